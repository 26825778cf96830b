"""Plans beside steps that ran: on devices that are attached, and residuals that correct them."""
