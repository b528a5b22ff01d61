#!/bin/sh
# The entry point of the image: makes environment variables of the secrets that Compose mounts as files, and becomes
# the command. So no password is in the image, in a command line, or in what `docker inspect` shows.
set -eu
for file in "${LUFFY_SECRETS:-/run/secrets}"/PREFECT_*; do
  if [ -f "$file" ]; then
    value=$(cat "$file") # fails here, and not silently, if this user cannot read it
    export "${file##*/}=$value"
  fi
done
exec "$@"
