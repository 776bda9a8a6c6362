#!/usr/bin/env bash
# Builds all parts of a release into dist/: wheels and source distributions, the chart, the kubectl plugin, bills of materials (CycloneDX), images as OCI
# archives if there is a container engine, and checksums.
#   REGISTRY=host/path   also pushes images and chart there; without it, nothing leaves the machine
#   IMAGES=no            omits the images
#   RELEASE_URL=url      where dist/ will be served: the manifest for krew names the plugin's archive there
#   OUT=folder           writes into this new folder instead of dist/
#   SIGN=keyless         signs checksums, images and charts with cosign as the identity of the workflow, and attests the images' bills of materials
#   SIGN=file            the same with this private key (COSIGN_PASSWORD), without any service: no entry in a transparency log
. "$(dirname "$(readlink -f "$0")")/../tests/e2e/cluster/settings.sh"

SIGN=${SIGN:-}
case $SIGN in "" | keyless) ;; *) [ -f "$SIGN" ] || die "SIGN=$SIGN is no file with a key"; SIGN=$(readlink -f "$SIGN") ;; esac
[ -z "$SIGN" ] || command -v cosign >/dev/null || die "SIGN needs cosign: bash .ci/tools.sh cosign"

ROOT=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
DIST=${OUT:-$ROOT/dist}
REGISTRY=${REGISTRY:-}
# What is pushed, by digest: images with the name of their bill of materials, charts without one.
PUSHED=()
cd "$ROOT"
VERSION=$(uv run --frozen python .ci/version.py --check)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 315532800)
export SOURCE_DATE_EPOCH

# Distribution -> the extras that its image installs.
declare -A EXTRAS=([engine]="--extra s3 --extra redis --extra rocksdb --extra cli" [operator]="--extra ui" [spark]="--extra spark")

wheels() {
  local name
  uv run --frozen python spark-images/catalog/build_catalog.py --check || die "the wheel persist-spark would have no jar of the catalog: make catalog"
  for name in engine operator spark; do uv build --quiet --package "persist-$name" --out-dir "$DIST/python"; done
  rm -f "$DIST/python/.gitignore"
  say "python: $(ls "$DIST/python" | wc -l) files"
}

bills_of_materials() {
  local name
  mkdir -p "$DIST/sbom"
  for name in engine operator spark; do
    # shellcheck disable=SC2086 # a list of words
    uv export --quiet --frozen --no-dev --preview-features sbom-export --format cyclonedx1.5 --package "persist-$name" ${EXTRAS[$name]} \
      --output-file "$DIST/sbom/persist-$name-$VERSION.cdx.json" >/dev/null
  done
  say "sbom: $(ls "$DIST/sbom" | wc -l) files"
}

chart() {
  mkdir -p "$DIST/charts"
  local name digest
  for name in persist-operator persist-operator-crds; do
    helm package "charts/$name" --version "$VERSION" --app-version "$VERSION" --destination "$DIST/charts" >/dev/null
    [ -n "$REGISTRY" ] || continue
    digest=$(helm push "$DIST/charts/$name-$VERSION.tgz" "oci://$REGISTRY/charts" 2>&1 | tee /dev/stderr | sed -n 's/^Digest: //p')
    PUSHED+=("$REGISTRY/charts/$name@$digest")
  done
  say "charts: persist-operator and persist-operator-crds $VERSION"
}

plugin() { # the kubectl plugin: its launcher under both names, and the wheels that it runs
  local folder name=kubectl-persist-$VERSION.tar.gz
  folder=$(mktemp -d)
  mkdir -p "$DIST/krew"
  cp operator/krew/kubectl-persist "$folder/kubectl-persist"
  cp operator/krew/kubectl-persist "$folder/kubectl_complete-persist"
  cp "$DIST/python/persist_operator-$VERSION-py3-none-any.whl" "$DIST/python/persist_engine-$VERSION-py3-none-any.whl" LICENSE "$folder"
  tar --create --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --directory "$folder" . | gzip -n >"$DIST/krew/$name"
  rm -rf "$folder"
  sed -e "s|VERSION, URI and SHA256|the version|" -e "s|VERSION|$VERSION|" -e "s|: URI$|: ${RELEASE_URL:+$RELEASE_URL/krew/}$name|" \
    -e "s|SHA256|$(sha256sum "$DIST/krew/$name" | cut -d' ' -f1)|" operator/krew/persist.yaml >"$DIST/krew/persist.yaml"
  say "krew: $name"
}

push() { # IMAGE: prints its digest in the registry, which differs from the local one where layers are compressed on the way
  local file
  if [ "$ENGINE" = podman ]; then
    file=$(mktemp)
    podman push --quiet --digestfile "$file" "$1" >&2
    cat "$file"
    rm -f "$file"
  else
    "$ENGINE" push --quiet "$1" >&2
    "$ENGINE" inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | sed -n "s|^${1%:*}@||p" | tail -1
  fi
}

images() {
  local name digest
  if [ "${IMAGES:-}" = no ]; then return 0; fi
  if ! command -v "$ENGINE" >/dev/null; then say "no container engine: no images"; return 0; fi
  mkdir -p "$DIST/images"
  PERSIST_TAG=$VERSION bash spark-images/build.sh
  for name in engine operator spark; do
    "$ENGINE" save --output "$DIST/images/persist-$name-$VERSION.tar" "localhost/persist-$name:$VERSION"
    [ -n "$REGISTRY" ] || continue
    "$ENGINE" tag "localhost/persist-$name:$VERSION" "$REGISTRY/persist-$name:$VERSION"
    digest=$(push "$REGISTRY/persist-$name:$VERSION")
    PUSHED+=("$REGISTRY/persist-$name@$digest $name")
  done
  say "images: engine operator spark"
}

cosigned() { # VERB ARGUMENT...: cosign with the identity or the key of this run
  local verb=$1; shift
  if [ "$SIGN" = keyless ]; then cosign "$verb" --yes "$@"
  else cosign "$verb" --yes --key "$SIGN" --use-signing-config=false --tlog-upload=false "$@"; fi
}

signatures() { # of the checksums, so of every file; of what was pushed; and the bills of materials as attestations of the images
  local one reference name
  if [ -z "$SIGN" ]; then say "not signed: SIGN=keyless in the workflow, or SIGN=cosign.key"; return 0; fi
  cosigned sign-blob --bundle "$DIST/SHA256SUMS.sigstore.json" "$DIST/SHA256SUMS" >/dev/null
  for one in ${PUSHED[@]+"${PUSHED[@]}"}; do
    read -r reference name <<<"$one"
    cosigned sign "$reference"
    [ -z "$name" ] || cosigned attest --type cyclonedx --predicate "$DIST/sbom/persist-$name-$VERSION.cdx.json" "$reference"
  done
  say "signed: SHA256SUMS and ${#PUSHED[@]} references"
}

if [ -z "${OUT:-}" ]; then rm -rf "$DIST"; elif [ -e "$DIST" ]; then die "$DIST exists"; fi
wheels
bills_of_materials
chart
plugin
images
(cd "$DIST" && find . -type f ! -name 'SHA256SUMS*' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum > SHA256SUMS)
signatures
say "version $VERSION in $DIST$([ -n "$REGISTRY" ] && echo ", pushed to $REGISTRY" || true)"
