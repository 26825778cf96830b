#!/bin/bash
# A TPU slice by queued resources of Google Cloud: requested, and again whenever it is lost;
# docs/clusters.md explains it. The slice's hosts train together, or not at all (without --elastic):
# a slice that lost a host cannot go on.
#
#   export NAME=train ZONE=us-west4-a IMAGE=REGISTRY/praxis_lite:latest SHARE=10.0.0.2:/share
#   clusters/queued_resources.sh create --exp=lm.PyDocs   # requests a slice, which then trains
#   clusters/queued_resources.sh keep --exp=lm.PyDocs     # that, and again if it is taken away
#   clusters/queued_resources.sh ssh 'sudo docker logs --tail=20 train'   # a command on all hosts
#   clusters/queued_resources.sh delete
#
# SHARE is an NFS share that the hosts can mount: Filestore, for instance. It is /job in the image.
set -euo pipefail

: "${NAME:?the name of the queued resource}" "${ZONE:?the zone}"
TYPE="${TYPE:-v5litepod-16}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
POLL_SECONDS="${POLL_SECONDS:-60}"

# Prints the script that each host runs whenever it starts. Docker starts a container that failed
# again, and passes SIGTERM on to it; a host that is taken away has 30 s.
startup_script() {
  cat <<EOS
#!/bin/bash
set -eu
mkdir -p /mnt/share
mountpoint -q /mnt/share || mount -t nfs -o hard '${SHARE:?HOST:/PATH of an NFS share}' /mnt/share
mkdir -p '/mnt/share/$NAME'
docker rm --force train 2>/dev/null || true
docker run --detach --name=train --init --restart=on-failure:100 --stop-timeout=25 \\
  --user=root --privileged --network=host --ipc=host --volume='/mnt/share/$NAME:/job' \\
  '${IMAGE:?the image of clusters/Dockerfile}' ${*@Q} --job_log_dir=/job --start_seconds=600 \\
  --health_dir=/health --grace_seconds=25
EOS
}

create() {
  local script
  script="$(mktemp)"
  startup_script "$@" >"$script"
  gcloud compute tpus queued-resources create "$NAME" --zone="$ZONE" --node-id="$NAME" \
    --accelerator-type="$TYPE" --runtime-version="$RUNTIME" --spot \
    --metadata-from-file=startup-script="$script"
  rm -f "$script"
}

delete() {
  gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" --force --quiet
}

state() {
  gcloud compute tpus queued-resources describe "$NAME" --zone="$ZONE" \
    --format='value(state.state)' 2>/dev/null || true
}

# Ends when the slice is deleted by hand.
keep() {
  local now before="" is_wanted=yes
  while true; do
    now="$(state)"
    [[ "$now" == "$before" ]] || echo "$(date +%H:%M:%S) $NAME: ${now:-absent}"
    before="$now"
    case "$now" in
      "")
        [[ -n "$is_wanted" ]] || return 0
        create "$@"
        is_wanted=""
        ;;
      SUSPENDED | FAILED)
        is_wanted=yes
        delete
        ;;
    esac
    sleep "$POLL_SECONDS"
  done
}

case "${1:-}" in
  create | keep) "$@" ;;
  delete) delete ;;
  ssh)
    gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="${2:?a command}"
    ;;
  *)
    sed -n '2,12p' "$0" >&2
    exit 2
    ;;
esac
