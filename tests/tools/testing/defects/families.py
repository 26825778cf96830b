"""All planted defects, by what is broken."""

from tests.tools.testing.defects import (
    by_collective,
    by_context,
    by_expert,
    by_gradient,
    by_host,
    by_learner,
    by_loss,
    by_mask,
    by_padding,
    by_part,
    by_pipeline,
    by_precision,
    by_row,
    by_saving,
    by_setting,
    by_tracker,
)

FAMILIES = {
    "collectives": by_collective.DEFECTS,
    "sums between devices": by_gradient.DEFECTS,
    "masks, positions, caches": by_mask.DEFECTS,
    "losses and metrics": by_loss.DEFECTS,
    "padding and filler": by_padding.DEFECTS,
    "the update": by_learner.DEFECTS,
    "parts of a batch": by_part.DEFECTS,
    "time split over devices": by_context.DEFECTS,
    "stages of a pipeline": by_pipeline.DEFECTS,
    "experts": by_expert.DEFECTS,
    "the host's memory": by_host.DEFECTS,
    "saving and data": by_saving.DEFECTS,
    "precision and programs": by_precision.DEFECTS,
    "rows and sizes": by_row.DEFECTS,
    "settings of how": by_setting.DEFECTS,
    "reported of others": by_tracker.DEFECTS,
}
