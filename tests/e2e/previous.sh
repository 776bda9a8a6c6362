#!/usr/bin/env bash
# previous.sh COMMIT: the tree of an earlier commit in build/previous, and its images with the tag `previous`, for the test of an upgrade.
# Idempotent; layers that are the same as today's come from the cache.
. "$(dirname "$(readlink -f "$0")")/cluster/settings.sh"
ROOT=$(cd "$CLUSTER_SCRIPTS/../../.." && pwd)
TREE=$ROOT/build/previous
commit=$(git -C "$ROOT" rev-parse --verify --quiet "${1:?usage: previous.sh COMMIT}^{commit}") || die "this clone lacks commit $1: git fetch --unshallow, or PREVIOUS=COMMIT"

if [ "$(cat "$TREE/.commit" 2>/dev/null)" != "$commit" ]; then
  rm -rf "$TREE"
  mkdir -p "$TREE"
  git -C "$ROOT" archive "$commit" | tar x -C "$TREE"
  [ ! -d "$ROOT/examples/flights/data" ] || cp -r "$ROOT/examples/flights/data" "$TREE/examples/flights/"
  echo "$commit" > "$TREE/.commit"
fi
PERSIST_TAG=previous bash "$TREE/spark-images/build.sh" engine operator spark examples
