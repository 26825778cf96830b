#!/bin/bash
# Requests a TPU slice as a queued resource of Google Cloud, and requests it again whenever it is
# lost. All hosts of the slice train together, without --elastic, because a slice that lost a host
# cannot continue. See docs/clusters.md.
#
#   export NAME=train ZONE=us-west4-a IMAGE=REGISTRY/praxis_lite:latest SHARE=10.0.0.2:/share
#   clusters/queued_resources.sh create --exp=lm.PyDocs   # requests a slice, which then trains
#   clusters/queued_resources.sh keep --exp=lm.PyDocs     # the same, and again if it is taken away
#   clusters/queued_resources.sh ssh 'sudo docker logs --tail=20 train'   # a command on all hosts
#   clusters/queued_resources.sh delete
#
# SHARE is the folder for jobs: an NFS share that the hosts can mount, such as Filestore, or
# gs://BUCKET/PATH, which the service account of the hosts can read and write. The job is in the
# folder NAME. For a bucket, build the image with --build-arg EXTRAS=plots,tpu,gcs.
set -euo pipefail

: "${NAME:?the name of the queued resource}" "${ZONE:?the zone}"
TYPE="${TYPE:-v5litepod-16}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
POLL_SECONDS="${POLL_SECONDS:-60}"

# Prints the script that each host runs when it starts. A container that failed is restarted up to
# 100 times, except after status 2 (an error that the user has to fix), 3 (the job has trained, but
# its last step was skipped), 4 (the restored state differs from the saved state), 126 or 127 (the
# program is missing in the image). Docker forwards SIGTERM to the container. A host that is taken
# away has 30 s to end.
startup_script() {
  local job="/job" mount="" volume=""
  if [[ "${SHARE:?HOST:/PATH of an NFS share, or gs://BUCKET/PATH}" == gs://* ]]; then
    job="${SHARE%/}/$NAME"
  else
    volume="--volume='/mnt/share/$NAME:/job'"
    mount="mkdir -p /mnt/share
mountpoint -q /mnt/share || mount -t nfs -o hard '$SHARE' /mnt/share
mkdir -p '/mnt/share/$NAME'"
  fi
  cat <<EOS
#!/bin/bash
set -eu
$mount
for try in {1..100}; do
  docker rm --force train 2>/dev/null || true
  status=0
  docker run --name=train --init --stop-timeout=25 \\
    --user=root --privileged --network=host --ipc=host $volume \\
    '${IMAGE:?the image of clusters/Dockerfile}' ${*@Q} --job_log_dir='$job' --start_seconds=600 \\
    --health_dir=/health --grace_seconds=25 || status=\$?
  case "\$status" in 0 | 2 | 3 | 4 | 126 | 127) break ;; esac
  echo "the container ended with status \$status, try \$try of 100" >&2
  sleep 10
done
exit "\$status"
EOS
}

create() {
  local script status=0
  script="$(mktemp)"
  startup_script "$@" >"$script"
  gcloud compute tpus queued-resources create "$NAME" --zone="$ZONE" --node-id="$NAME" \
    --accelerator-type="$TYPE" --runtime-version="$RUNTIME" --spot \
    --metadata-from-file=startup-script="$script" || status=$?
  rm -f "$script"
  return "$status"
}

delete() {
  gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" --force --quiet
}

describe() {
  gcloud compute tpus queued-resources describe "$NAME" --zone="$ZONE" \
    --format='value(state.state)'
}

# Runs a gcloud command. Sets `status`, and sets `errors` to its standard error.
call() {
  local file
  file="$(mktemp)"
  status=0
  "$@" 2>"$file" || status=$?
  errors="$(cat "$file")"
  rm -f "$file"
  [[ -z "$errors" ]] || echo "$errors" >&2
}

# Succeeds if a retry cannot help: gcloud is missing or rejects its arguments, or Google rejects the
# request. All other errors (503, an expired token, a quota, the network) may be temporary.
is_permanent() {
  [[ $status -eq 2 || $status -eq 126 || $status -eq 127 ||
    "$errors" =~ INVALID_ARGUMENT|PERMISSION_DENIED ]]
}

# Returns 0 when the slice has been deleted by hand, or the status of an error that is permanent.
keep() {
  local now before="" is_wanted=yes has_answered="" status errors answer
  answer="$(mktemp)"
  while true; do
    call describe >"$answer"
    now="$(cat "$answer")"
    if [[ $status -ne 0 && "$errors" == *NOT_FOUND* ]]; then
      now=absent
    elif [[ $status -ne 0 || -z "$now" ]]; then
      # If the slice has existed before, only its deletion ends the loop.
      [[ -n "$has_answered" ]] || ! is_permanent || return "$status"
      now=unknown
    fi
    [[ "$now" == unknown ]] || has_answered=yes
    [[ "$now" == "$before" ]] || echo "$(date +%H:%M:%S) $NAME: $now"
    before="$now"
    case "$now" in
      absent)
        [[ -n "$is_wanted" ]] || return 0
        call create "$@"
        if [[ $status -eq 0 || "$errors" == *ALREADY_EXISTS* ]]; then
          is_wanted=""
        elif is_permanent || [[ "$errors" == *NOT_FOUND* ]]; then
          return "$status"
        fi
        ;;
      SUSPENDED | FAILED)
        is_wanted=yes
        call delete # If it fails, the next iteration retries.
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
    sed -n '2,14p' "$0" >&2
    exit 2
    ;;
esac
