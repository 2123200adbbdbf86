//! Comparison of the compile step with a real istiod: same configuration, same proxies, resource by resource.
//!
//! The recordings and their inputs are in `tests/istiod` of the repository. Messages are compared as JSON, in which
//! differences have names and unordered fields no order. Permitted differences are in `allowed.rs`, and with the same
//! words in `docs/compatibility.md`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where it cannot go on")]

mod allowed;
mod json;
mod status;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use prost::Message as _;
use serde_json::Value;
use skysail_model::{
    Origin, ProxyNode, World,
    api::{Object, Secret, Typed, kube::Locality},
    compile, compile_for, parse,
};
use skysail_xds::{Kind, Resources, envoy::pb::envoy::service::discovery::v3::DiscoveryResponse};

use allowed::ALLOWED;

/// Service that a Kubernetes API server creates for itself.
const KUBERNETES: &str = r"
apiVersion: v1
kind: Service
metadata: {name: kubernetes, namespace: default}
spec:
  clusterIP: 10.96.0.1
  ports: [{name: https, port: 443, targetPort: 6443}]
";

/// The addresses that istiod allocated in the recordings of proxies with `DNS_AUTO_ALLOCATE`.
const ALLOCATED: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: skysail-addresses, namespace: istio-system}
data: ";

/// Addresses by recording and host.
const ALLOCATED_TO: &[(&str, &str)] = &[
    ("g-serviceentry", "{edition.cnn.com: 240.240.0.4, httpbin.org: 240.240.0.3}"),
    (
        "q-serviceentry-kinds",
        "{queue.example.net: 240.240.0.3, store.example.net: 240.240.0.4, rr.example.net: 240.240.0.5, \
          '*.dyn.example.net': 240.240.0.6, ratings.default.svc.cluster.local: 240.240.0.7, \
          pool.example.net: 240.240.0.8, private.example.net: 240.240.0.9, for-default.example.net: 240.240.0.10}",
    ),
];

/// Defines a test for each recorded scenario.
macro_rules! scenarios {
    ($($(#[$attribute:meta])* $name:ident = $scenario:literal,)*) => {
        $(#[test] $(#[$attribute])* fn $name() {
            compare($scenario);
        })*
    };
}

scenarios! {
    a_bookinfo = "a-bookinfo",
    b_mtls_all_v1 = "b-mtls-all-v1",
    c_reviews_test_v2 = "c-reviews-test-v2",
    d_fault_abort = "d-fault-abort",
    d_fault_delay = "d-fault-delay",
    e_reviews_50_v3 = "e-reviews-50-v3",
    f_strict_authz = "f-strict-authz",
    f2_authz_deny_custom_ports = "f2-authz-deny-custom-ports",
    g_serviceentry = "g-serviceentry",
    h_sidecar_own_namespace = "h-sidecar-own-namespace",
    h2_sidecar_registry_only = "h2-sidecar-registry-only",
    i_jwt = "i-jwt",
    j_ingress_gateway = "j-ingress-gateway",
    j2_ingress_gateway_tls = "j2-ingress-gateway-tls",
    k_gateway_api = "k-gateway-api",
    k2_gamma = "k2-gamma",
    k3_gamma_features = "k3-gamma-features",
    l_tcp = "l-tcp",
    m_telemetry = "m-telemetry",
    n_destinationrule_policies = "n-destinationrule-policies",
    o_virtualservice_features = "o-virtualservice-features",
    p_gateway_tls = "p-gateway-tls",
    p2_gateway_merge = "p2-gateway-merge",
    p3_egress_gateway = "p3-egress-gateway",
    q_serviceentry_kinds = "q-serviceentry-kinds",
    q2a_egress_registry_only = "q2a-egress-registry-only",
    q2b_egress_dynamic_dns = "q2b-egress-dynamic-dns",
    r_vs_tls_tcp = "r-vs-tls-tcp",
    s_envoyfilter = "s-envoyfilter",
    t_telemetry_kinds = "t-telemetry-kinds",
    u_authz_kinds = "u-authz-kinds",
    v_jwt_kinds = "v-jwt-kinds",
    w_sidecar_kinds = "w-sidecar-kinds",
    x_dr_kinds = "x-dr-kinds",
    y1_mesh_paths_json = "y1-mesh-paths-json",
    y2_mesh_tls_locality = "y2-mesh-tls-locality",
    y3_mesh_inbound_selectors = "y3-mesh-inbound-selectors",
    z_gatewayapi_kinds = "z-gatewayapi-kinds",
    z2_ingress = "z2-ingress",
}

/// An Envoy without Istio's filters refuses every resource that names one.
#[test]
fn plain_envoys_get_no_filters_of_istio() {
    let world = world("b-mtls-all-v1");
    let mut node = node(&recordings("b-mtls-all-v1")[0]);
    node.view.plain_envoy = true;
    let (made, _) = compile(&world, &node.view);
    for kind in [Kind::Cluster, Kind::Listener, Kind::Route] {
        for resource in made.iter(kind) {
            let text = String::from_utf8_lossy(&resource.body);
            let found = [
                "istio.stats",
                "istio.alpn",
                "istio.metadata_exchange",
                "istio-peer-exchange",
                "TypedStruct",
            ]
            .into_iter()
            .filter(|own| text.contains(own))
            // The filter chains still match the ALPN of peers with the filters.
            .filter(|own| !(kind == Kind::Listener && *own == "istio-peer-exchange"));
            assert_eq!(found.collect::<Vec<_>>(), [""; 0], "{kind} {}", resource.name);
        }
    }
}

/// Compares every recorded proxy of a scenario.
fn compare(scenario: &str) {
    let mut world = world(scenario);
    let mut differences = Vec::new();
    let (with_addresses, others): (Vec<_>, Vec<_>) =
        recordings(scenario).into_iter().partition(|folder| folder.ends_with("productpage-v1-dns"));
    for folder in others.into_iter().chain(with_addresses) {
        if folder.ends_with("productpage-v1-dns") {
            let allocated = ALLOCATED_TO.iter().find(|(of, _)| *of == scenario);
            let data = allocated.map_or("{}", |(_, data)| data);
            apply(&mut world, &format!("{ALLOCATED}{data}"), "addresses.yaml");
        }
        let mut node = node(&folder);
        // The recording assumes that productpage's pod has an address of each family, which the Pod object does not
        // have.
        if folder.ends_with("productpage-v1-dual") {
            node.pod.push_str("-dual");
        }
        world.identify(&mut node, "Kubernetes").unwrap();
        let (made, _) = compile_for(&world, &node.view, node.hostname());
        for kind in
            [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route, Kind::Secret, Kind::NameTable]
        {
            let (expected, actual) = (recorded(&folder, kind), compiled(&made, kind));
            let proxy = folder.file_name().unwrap().to_string_lossy();
            compare_kind(&format!("{proxy} {kind}"), &expected, &actual, &mut differences);
        }
    }
    let unexpected: Vec<_> = differences.iter().filter(|found| !is_allowed(scenario, found)).collect();
    let shown: Vec<_> = unexpected.iter().take(20).map(|found| found.as_str()).collect();
    assert!(unexpected.is_empty(), "{} differences:\n{}", unexpected.len(), shown.join("\n"));
    for entry in ALLOWED.iter().filter(|entry| entry.scenario == scenario) {
        let met = differences.iter().any(|found| found.contains(entry.part));
        assert!(met, "{} no longer differs ({}): take it off the list", entry.part, entry.reason);
    }
}

fn is_allowed(scenario: &str, found: &str) -> bool {
    ALLOWED.iter().any(|entry| entry.scenario == scenario && found.contains(entry.part))
}

/// Resources by name: their JSON form, and the bytes of everything packed in them.
type ByName = BTreeMap<String, (Value, BTreeSet<Vec<u8>>)>;

fn compare_kind(place: &str, expected: &ByName, actual: &ByName, differences: &mut Vec<String>) {
    let names: BTreeSet<&String> = expected.keys().chain(actual.keys()).collect();
    for name in names {
        let place = format!("{place} {name}");
        match (expected.get(name), actual.get(name)) {
            (Some((expected, packed)), Some((actual, other))) => {
                let before = differences.len();
                json::compare(&place, expected, actual, differences);
                // Other tools compare packed messages byte by byte.
                if differences.len() == before && packed != other {
                    differences.push(format!("{place}: packed otherwise"));
                }
            }
            (Some(_), None) => differences.push(format!("{place}: missing")),
            _ => differences.push(format!("{place}: istiod has no such resource")),
        }
    }
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/istiod")
}

/// Returns the World of a scenario: the cluster, then the objects applied on top.
fn world(scenario: &str) -> World {
    let mut world = World::new();
    apply(&mut world, KUBERNETES, "kubernetes.yaml");
    for folder in ["00-base", scenario] {
        let mut files: Vec<_> =
            fs::read_dir(data().join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "yaml")) {
            if file.ends_with("status-after.yaml") {
                continue;
            }
            let text = fs::read_to_string(file).unwrap();
            if file.ends_with("secrets-without-keys.yaml") {
                apply_secrets(&mut world, &text);
            } else {
                apply(&mut world, &text, &file.to_string_lossy());
            }
        }
    }
    world.settle();
    world
}

/// Adds the objects of a text.
fn apply(world: &mut World, text: &str, file: &str) {
    let parsed = parse(text, file);
    let errors: Vec<_> = parsed
        .diagnostics
        .iter()
        .filter(|found| found.severity == skysail_model::Severity::Error)
        .map(ToString::to_string)
        .collect();
    assert_eq!(errors, [""; 0], "{file}");
    for (object, origin) in parsed.objects {
        world.apply(object, origin);
    }
}

/// Adds Secrets whose private keys are replaced by other words, which a file may not have.
fn apply_secrets(world: &mut World, text: &str) {
    for document in skysail_yaml::documents(text) {
        let written = document.root.unwrap().to_json();
        if written["kind"] == "ConfigMap" {
            apply(world, &written.to_string(), "config-map.json");
        }
        if written["kind"] != "Secret" {
            continue;
        }
        let text = |of: &Value| of.as_str().unwrap().to_owned();
        let data = written["data"].as_object().into_iter().flatten();
        let values = data.map(|(name, value)| (name.clone(), BASE64_STANDARD.decode(text(value)).unwrap()));
        let mut secret = Typed { spec: Secret::with_values(values), ..Typed::default() };
        secret.meta.name = text(&written["metadata"]["name"]);
        secret.meta.namespace = text(&written["metadata"]["namespace"]);
        world.apply(Object::Secret(Arc::new(secret)), Origin::default());
    }
}

/// Returns the folders of the recorded proxies.
fn recordings(scenario: &str) -> Vec<PathBuf> {
    let proxies = fs::read_dir(data().join(scenario).join("xds")).unwrap();
    let mut folders: Vec<_> = proxies.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

fn node(folder: &Path) -> ProxyNode {
    let node: Value = serde_json::from_str(&fs::read_to_string(folder.join("node.json")).unwrap()).unwrap();
    let id = node["id"].as_str().unwrap();
    let mut node = ProxyNode::parse(id, node["metadata"].clone(), Locality::default()).unwrap();
    node.view.is_authenticated = true;
    node
}

/// Returns the recorded resources by name.
fn recorded(folder: &Path, kind: Kind) -> ByName {
    // A gateway asks for further secrets once it has listeners.
    let files = [format!("{}.sotw.pb.gz", kind.short()), format!("{}.2.sotw.pb.gz", kind.short())];
    let mut all = ByName::new();
    for file in files.into_iter().filter_map(|name| fs::File::open(folder.join(name)).ok()) {
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
        let response = DiscoveryResponse::decode(bytes.as_slice()).unwrap();
        all.extend(response.resources.iter().map(|resource| json::named(kind, &resource.value)));
    }
    all
}

fn compiled(made: &Resources, kind: Kind) -> ByName {
    made.iter(kind).map(|resource| json::named(kind, &resource.body)).collect()
}
