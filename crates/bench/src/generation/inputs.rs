//! Objects with the numbers and kinds of those in istiod's benchmark of the generation of configuration.
//!
//! Source of the numbers: istio/istio, `pilot/pkg/xds/bench_test.go` and `pilot/pkg/xds/testdata/benchmarks`, commit
//! 86c9f01fd735 of 2026-08-22. Names, hosts and addresses are our own.

use std::{fmt::Write as _, net::Ipv4Addr};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{GenerationInput, ProxyKind};
use crate::certificates;

/// Address of the proxy.
pub(super) const ADDRESS: &str = "192.0.2.1";
/// Label of a gateway, by which Gateways select it.
pub(super) const LABEL: (&str, &str) = ("measured", "gateway");
/// Namespace of the Gateways, and of the VirtualServices of gateways.
const EDGE: &str = "edge";
/// Namespace of the configuration of the whole mesh.
const ROOT: &str = "istio-system";
/// Number of networks in the template `endpoints`.
const NETWORKS: u32 = 4;
/// First addresses of services and of endpoints.
const SERVICES: Ipv4Addr = Ipv4Addr::new(240, 240, 0, 1);
const ENDPOINTS: Ipv4Addr = Ipv4Addr::new(240, 241, 0, 1);

/// Port of a service: number, name and protocol; the proxy detects an empty protocol.
type PortSpec = (u16, &'static str, &'static str);

const HTTP: PortSpec = (80, "http", "HTTP");
const HTTPS: PortSpec = (443, "https", "HTTPS");
const TCP: PortSpec = (7070, "tcp", "TCP");
const TLS: PortSpec = (7070, "tls", "TLS");
const AUTO: PortSpec = (7070, "auto", "");
/// One port for each way to handle a connection.
const FOUR: [PortSpec; 4] = [HTTP, TCP, HTTPS, (9090, "auto", "")];

/// A set of objects, named as in istiod's benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum InputTemplate {
    /// A Gateway with two servers, a VirtualService of three hosts and a ServiceEntry for each service.
    Gateways,
    /// One Gateway. A VirtualService of the same three hosts with six prefixes, and a ServiceEntry for each service.
    GatewaysShared,
    /// The objects of Knative: two Gateways, and two VirtualServices with six routes for each service.
    KnativeGateway,
    /// A Gateway with a server and a Secret for each service.
    Secrets,
    /// Services with four ports and mutual TLS.
    Empty,
    /// Services with a port of this protocol and mutual TLS.
    Http,
    Tcp,
    Tls,
    /// Services with a port without protocol.
    Auto,
    /// No service. A PeerAuthentication that requires mutual TLS.
    Strict,
    /// No service. A PeerAuthentication that disables mutual TLS.
    Disabled,
    /// Kubernetes Services of type ExternalName.
    Externalname,
    /// Services with four ports, and a Telemetry with metrics and an access log in JSON.
    TelemetryApi,
    /// A VirtualService with a rewrite and a ServiceEntry for each service.
    Virtualservice,
    /// AuthorizationPolicies of the proxy's namespace.
    Authorizationpolicy,
    /// Services with four ports whose endpoints are WorkloadEntries.
    ServiceentryWorkloadentry,
    /// Services with many endpoints in four networks.
    Endpoints,
}

impl InputTemplate {
    #[cfg(test)]
    pub(super) const ALL: [Self; 17] = [
        Self::Gateways,
        Self::GatewaysShared,
        Self::KnativeGateway,
        Self::Secrets,
        Self::Empty,
        Self::Http,
        Self::Tcp,
        Self::Tls,
        Self::Auto,
        Self::Strict,
        Self::Disabled,
        Self::Externalname,
        Self::TelemetryApi,
        Self::Virtualservice,
        Self::Authorizationpolicy,
        Self::ServiceentryWorkloadentry,
        Self::Endpoints,
    ];

    /// Returns the name in scenarios.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gateways => "gateways",
            Self::GatewaysShared => "gateways-shared",
            Self::KnativeGateway => "knative-gateway",
            Self::Secrets => "secrets",
            Self::Empty => "empty",
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Auto => "auto",
            Self::Strict => "strict",
            Self::Disabled => "disabled",
            Self::Externalname => "externalname",
            Self::TelemetryApi => "telemetry-api",
            Self::Virtualservice => "virtualservice",
            Self::Authorizationpolicy => "authorizationpolicy",
            Self::ServiceentryWorkloadentry => "serviceentry-workloadentry",
            Self::Endpoints => "endpoints",
        }
    }

    /// Returns the kind of the proxy.
    pub(crate) fn proxy(self) -> ProxyKind {
        match self {
            Self::Gateways | Self::GatewaysShared | Self::KnativeGateway | Self::Secrets => {
                ProxyKind::Gateway
            }
            _ => ProxyKind::Sidecar,
        }
    }

    /// Returns whether the number of services has an effect.
    pub(crate) fn has_services(self) -> bool {
        !matches!(self, Self::Strict | Self::Disabled)
    }

    /// Returns whether the number of instances has an effect.
    pub(crate) fn has_instances(self) -> bool {
        matches!(self, Self::ServiceentryWorkloadentry | Self::Endpoints)
    }
}

/// Returns the objects of an input as YAML in block style, as people write it.
///
/// # Errors
/// A certificate cannot be made.
pub(super) fn text(input: &GenerationInput) -> anyhow::Result<String> {
    let mut text = String::new();
    for object in objects(input)? {
        text.push_str("---");
        write_block(&mut text, &object, 0);
        text.push('\n');
    }
    Ok(text)
}

/// Writes a value behind a key, a `-` or a document marker.
fn write_block(to: &mut String, value: &Value, depth: usize) {
    // Writing to a String cannot fail.
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            // The first field of an item is on the line of its `-`.
            let is_item = to.ends_with(" -");
            for (index, (key, value)) in fields.iter().enumerate() {
                let _ = match is_item && index == 0 {
                    true => write!(to, " {key}:"),
                    false => write!(to, "\n{:1$}{key}:", "", 2 * depth),
                };
                write_block(to, value, depth + 1);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                let _ = write!(to, "\n{:1$}-", "", 2 * depth);
                write_block(to, item, depth + 1);
            }
        }
        Value::String(text) if is_plain(text) => _ = write!(to, " {text}"),
        // JSON is YAML.
        other => _ = write!(to, " {other}"),
    }
}

/// Returns whether a text needs no quotes.
fn is_plain(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-./_".contains(&byte);
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(is_allowed)
        && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"]
            .contains(&&*text.to_ascii_lowercase())
}

fn objects(input: &GenerationInput) -> anyhow::Result<Vec<Value>> {
    let GenerationInput { template, services, instances, .. } = *input;
    Ok(match template {
        InputTemplate::Gateways => {
            let of = |number| [gateway(number), gateway_rule(number), external(number, &[HTTP])];
            own(&[HTTP, HTTPS], false).into_iter().chain((0..services).flat_map(of)).collect()
        }
        InputTemplate::GatewaysShared => {
            let of = |number| [shared_rule(number), external(number, &[HTTP])];
            let fixed = own(&[HTTP, HTTPS], false).into_iter().chain([shared_gateway()]);
            fixed.chain((0..services).flat_map(of)).collect()
        }
        InputTemplate::KnativeGateway => knative(services),
        InputTemplate::Secrets => secrets(services)?,
        InputTemplate::Empty => own_and(&FOUR, services, |number| internal(number, &FOUR)),
        InputTemplate::Http => own_and(&[HTTP], services, |number| internal(number, &[HTTP])),
        InputTemplate::Tcp => own_and(&[TCP], services, |number| internal(number, &[TCP])),
        InputTemplate::Tls => own_and(&[TLS], services, |number| internal(number, &[TLS])),
        InputTemplate::Auto => own_and(&[AUTO], services, |number| internal(number, &[AUTO])),
        InputTemplate::Strict => [own(&FOUR, false), vec![mtls_mode("STRICT")]].concat(),
        InputTemplate::Disabled => [own(&FOUR, false), vec![mtls_mode("DISABLE")]].concat(),
        InputTemplate::Externalname => own_and(&[HTTP], services, external_name),
        InputTemplate::TelemetryApi => {
            let fixed = own(&FOUR, false).into_iter().chain([json_log(), telemetry()]);
            fixed.chain((0..services).map(|number| external(number, &FOUR))).collect()
        }
        InputTemplate::Virtualservice => {
            let of = |number| [sidecar_rule(number), external(number, &[HTTP])];
            own(&[HTTP], false).into_iter().chain((0..services).flat_map(of)).collect()
        }
        InputTemplate::Authorizationpolicy => {
            own(&[HTTP, HTTPS], false).into_iter().chain((0..services).map(policy)).collect()
        }
        InputTemplate::ServiceentryWorkloadentry => {
            let entries = (0..instances).map(|number| workload_entry(number, services));
            own_and(&FOUR, services, selecting).into_iter().chain(entries).collect()
        }
        InputTemplate::Endpoints => {
            let services = (0..services).map(|number| with_endpoints(number, instances));
            services.chain(networks_and_modes()).collect()
        }
    })
}

fn own_and(ports: &[PortSpec], services: u32, of: impl Fn(u32) -> Value) -> Vec<Value> {
    own(ports, true).into_iter().chain((0..services).map(of)).collect()
}

fn object(version: &str, kind: &str, (namespace, name): (&str, String), spec: Value) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec})
}

fn networking(kind: &str, place: (&str, String), spec: Value) -> Value {
    object("networking.istio.io/v1", kind, place, spec)
}

fn security(kind: &str, place: (&str, String), spec: Value) -> Value {
    object("security.istio.io/v1", kind, place, spec)
}

fn host(number: u32) -> String {
    format!("shop-{number}.mesh.example")
}

fn address(first: Ipv4Addr, number: u32) -> String {
    Ipv4Addr::from_bits(first.to_bits() + number).to_string()
}

fn ports_of(ports: &[PortSpec]) -> Vec<Value> {
    let port =
        |&(number, name, protocol): &PortSpec| json!({"number": number, "name": name, "protocol": protocol});
    ports.iter().map(port).collect()
}

/// Returns an endpoint that accepts mutual TLS.
fn mutual(address: &str) -> Value {
    json!({"address": address, "labels": {"security.istio.io/tlsMode": "istio"}})
}

/// Returns the service of the proxy's own workload.
fn own(ports: &[PortSpec], is_internal: bool) -> Vec<Value> {
    let mut spec = json!({
        "hosts": ["own.mesh.example"], "ports": ports_of(ports), "resolution": "STATIC",
        "endpoints": [{"address": ADDRESS, "labels": {LABEL.0: LABEL.1}}],
    });
    if is_internal {
        spec["location"] = json!("MESH_INTERNAL");
        spec["endpoints"] = json!([mutual(ADDRESS)]);
    }
    vec![networking("ServiceEntry", ("default", "own".to_owned()), spec)]
}

/// Returns a service in the mesh, with an address and an endpoint with mutual TLS.
fn internal(number: u32, ports: &[PortSpec]) -> Value {
    let spec = json!({
        "addresses": [address(SERVICES, number)], "hosts": [host(number)], "ports": ports_of(ports),
        "resolution": "STATIC", "location": "MESH_INTERNAL",
        "endpoints": [mutual(&address(ENDPOINTS, number))],
    });
    networking("ServiceEntry", ("default", format!("shop-{number}")), spec)
}

/// Returns a service outside of the mesh; all have the same endpoint.
fn external(number: u32, ports: &[PortSpec]) -> Value {
    let spec = json!({
        "hosts": [host(number)], "ports": ports_of(ports), "resolution": "STATIC",
        "endpoints": [{"address": "198.51.100.7"}],
    });
    networking("ServiceEntry", ("default", format!("shop-{number}")), spec)
}

/// Returns a service whose endpoints are the WorkloadEntries with its label.
fn selecting(number: u32) -> Value {
    let spec = json!({
        "hosts": [host(number)], "ports": ports_of(&FOUR), "resolution": "STATIC", "location": "MESH_INTERNAL",
        "workloadSelector": {"labels": {"app": format!("shop-{number}")}},
    });
    networking("ServiceEntry", ("default", format!("shop-{number}")), spec)
}

fn workload_entry(number: u32, services: u32) -> Value {
    let spec = json!({
        "serviceAccount": "shop", "address": address(ENDPOINTS, number),
        "labels": {"app": format!("shop-{}", number % services.max(1))},
    });
    networking("WorkloadEntry", ("default", format!("machine-{number}")), spec)
}

fn external_name(number: u32) -> Value {
    let spec = json!({
        "type": "ExternalName", "externalName": format!("shop-{number}.example.net"),
        "ports": [{"port": 80, "name": "http"}],
    });
    object("v1", "Service", ("default", format!("shop-{number}")), spec)
}

/// Returns the servers for HTTP and HTTPS of these hosts.
fn servers(hosts: &[String]) -> Value {
    json!([
        {"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": hosts},
        {"port": {"number": 443, "name": "https", "protocol": "HTTPS"}, "hosts": hosts, "tls": {"mode": "ISTIO_MUTUAL"}},
    ])
}

fn three_hosts(number: u32) -> [String; 3] {
    ["www", "api", "img"].map(|part| format!("{part}-{number}.edge.example"))
}

fn gateway(number: u32) -> Value {
    let spec = json!({"selector": {LABEL.0: LABEL.1}, "servers": servers(&three_hosts(number))});
    networking("Gateway", (EDGE, format!("edge-{number}")), spec)
}

fn gateway_rule(number: u32) -> Value {
    let spec = json!({
        "hosts": three_hosts(number), "gateways": [format!("{EDGE}/edge-{number}")],
        "http": [{
            "match": [{"uri": {"prefix": format!("/shop-{number}")}}],
            "route": [{"destination": {"host": host(number)}}],
        }],
    });
    networking("VirtualService", (EDGE, format!("shop-{number}")), spec)
}

fn shared_gateway() -> Value {
    let spec = json!({"selector": {LABEL.0: LABEL.1}, "servers": servers(&three_hosts(0))});
    networking("Gateway", (EDGE, "edge".to_owned()), spec)
}

fn shared_rule(number: u32) -> Value {
    let prefixes = ["list", "item", "cart", "pay", "find", "help"];
    let matches = prefixes.map(|part| json!({"uri": {"prefix": format!("/{part}-{number}")}}));
    let spec = json!({
        "hosts": three_hosts(0), "gateways": [format!("{EDGE}/edge")],
        "http": [{"match": matches, "route": [{"destination": {"host": host(number)}}]}],
    });
    networking("VirtualService", (EDGE, format!("shop-{number}")), spec)
}

fn sidecar_rule(number: u32) -> Value {
    let spec = json!({
        "hosts": [host(number)],
        "http": [{
            "name": "moved", "match": [{"uri": {"prefix": "/old"}}, {"uri": {"regex": "/older"}}],
            "rewrite": {"uri": "/current"}, "route": [{"destination": {"host": host(number)}}],
        }],
    });
    networking("VirtualService", ("default", format!("shop-{number}")), spec)
}

/// Returns the two entry points of Knative with their Gateways, and two VirtualServices for each service. All of a kind
/// have the same hosts, as in istiod's benchmark.
fn knative(services: u32) -> Vec<Value> {
    let entry = |name: &str, target: u16| {
        let spec = json!({
            "hosts": [format!("{name}-gateway.{ROOT}.svc.cluster.local")],
            "ports": [{"number": 80, "targetPort": target, "name": "http", "protocol": "HTTP"}],
            "resolution": "STATIC", "endpoints": [{"address": ADDRESS, "labels": {LABEL.0: LABEL.1}}],
        });
        networking("ServiceEntry", (ROOT, name.to_owned()), spec)
    };
    let gateway = |name: &str, port: u16| {
        let server = json!({"hosts": ["*"], "port": {"name": "http", "number": port, "protocol": "HTTP"}});
        networking(
            "Gateway",
            (EDGE, name.to_owned()),
            json!({"selector": {LABEL.0: LABEL.1}, "servers": [server]}),
        )
    };
    let fixed = [entry("outer", 8080), entry("inner", 8081), gateway("outer", 80), gateway("inner", 8081)];
    let of = |number| [knative_rule(number, true), knative_rule(number, false)];
    fixed.into_iter().chain((0..services).flat_map(of)).collect()
}

/// Returns the VirtualService of a service that is public, or of one within the cluster. Each prefix has a route for
/// probes, and a route for requests.
fn knative_rule(number: u32, is_public: bool) -> Value {
    let (inner, outer) = (format!("{EDGE}/inner"), format!("{EDGE}/outer"));
    let name = if is_public { "greet" } else { "hidden" };
    let mut hosts = vec![
        format!("{name}.default"),
        format!("{name}.default.svc"),
        format!("{name}.default.svc.cluster.local"),
    ];
    let mut entries = vec![(&inner, format!("{name}.default"))];
    let mut gateways = vec![&inner];
    if is_public {
        hosts.push(format!("{name}.default.edge.example"));
        entries.push((&outer, format!("{name}.default.edge.example")));
        gateways.insert(0, &outer);
    }
    let routes = entries.iter().flat_map(|(gateway, prefix)| {
        [true, false].map(|is_probe| {
            let mut route = json!({
                "match": [{"authority": {"prefix": prefix}, "gateways": [gateway]}],
                "route": [{
                    "destination": {"host": format!("{name}-{number}.default.svc.cluster.local"), "port": {"number": 80}},
                    "headers": {"request": {"set": {
                        "Serving-Namespace": "default", "Serving-Revision": format!("{name}-{number}"),
                    }}},
                    "weight": 100,
                }],
            });
            if is_probe {
                route["match"][0]["headers"] = json!({"Probe-Hash": {"exact": "override"}});
                route["headers"] = json!({"request": {"set": {"Probe-Hash": "7c".repeat(32)}}});
            }
            route
        })
    });
    let spec = json!({"gateways": gateways, "hosts": hosts, "http": routes.collect::<Vec<_>>()});
    networking("VirtualService", ("default", format!("{name}-{number}")), spec)
}

/// Returns Secrets with one certificate, and a Gateway with a server for each of them. istiod's benchmark requests the
/// Secrets by name instead.
fn secrets(services: u32) -> anyhow::Result<Vec<Value>> {
    let certificate = certificates::of_host(&certificates::authority()?, "edge.example")?;
    let data = json!({"tls.crt": certificate.chain, "tls.key": certificate.key});
    let secret = |number: u32| {
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
            "metadata": {"name": format!("shop-{number}"), "namespace": "default"}, "stringData": data,
        })
    };
    let server = |number: u32| {
        json!({
            "port": {"number": 443, "name": format!("https-{number}"), "protocol": "HTTPS"},
            "hosts": [format!("www-{number}.edge.example")],
            "tls": {"mode": "SIMPLE", "credentialName": format!("shop-{number}")},
        })
    };
    let servers: Vec<Value> = (0..services).map(server).collect();
    let spec = json!({"selector": {LABEL.0: LABEL.1}, "servers": servers});
    let gateway = networking("Gateway", ("default", "edge".to_owned()), spec);
    Ok([gateway].into_iter().chain((0..services).map(secret)).collect())
}

fn mtls_mode(mode: &str) -> Value {
    security("PeerAuthentication", ("default", "default".to_owned()), json!({"mtls": {"mode": mode}}))
}

/// Returns a mesh configuration whose provider `json` writes an access log in JSON.
fn json_log() -> Value {
    let provider =
        json!({"name": "json", "envoyFileAccessLog": {"path": "/dev/stdout", "logFormat": {"labels": {}}}});
    mesh_config(&json!({"mesh": json!({"extensionProviders": [provider]}).to_string()}))
}

fn mesh_config(data: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "istio", "namespace": ROOT}, "data": data,
    })
}

fn telemetry() -> Value {
    let spec = json!({
        "metrics": [{"providers": [{"name": "prometheus"}]}],
        "accessLogging": [{"providers": [{"name": "json"}]}],
    });
    object("telemetry.istio.io/v1", "Telemetry", (ROOT, "all".to_owned()), spec)
}

fn policy(number: u32) -> Value {
    let rule = json!({
        "from": [{"source": {"namespaces": ["default"]}}], "to": [{"operation": {"methods": ["POST"]}}],
    });
    let spec = json!({"action": "DENY", "rules": [rule]});
    security("AuthorizationPolicy", ("default", format!("deny-{number}")), spec)
}

/// Returns a service whose endpoints are spread over the networks.
fn with_endpoints(number: u32, endpoints: u32) -> Value {
    let endpoint = |endpoint: u32| {
        json!({
            "address": address(ENDPOINTS, endpoint), "network": format!("network-{}", endpoint % NETWORKS),
            "serviceAccount": "shop", "labels": {"tier": "measured", "app": format!("shop-{number}")},
        })
    };
    let spec = json!({
        "hosts": [host(number)], "ports": ports_of(&[HTTP]), "resolution": "STATIC",
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    });
    networking("ServiceEntry", ("default", format!("shop-{number}")), spec)
}

/// Returns a gateway for each network, and PeerAuthentications of the mesh, the namespace and the endpoints.
fn networks_and_modes() -> [Value; 4] {
    let network = |number: u32| {
        let gateway = json!({"address": format!("203.0.113.{number}"), "port": 15443});
        (format!("network-{number}"), json!({"gateways": [gateway]}))
    };
    let networks: serde_json::Map<String, Value> = (0..NETWORKS).map(network).collect();
    let disable = json!({"mode": "DISABLE"});
    let selector = json!({"selector": {"matchLabels": {"tier": "measured"}}, "mtls": disable});
    let of = |namespace, name: &str, spec| security("PeerAuthentication", (namespace, name.to_owned()), spec);
    [
        mesh_config(&json!({"mesh": "", "meshNetworks": json!({"networks": networks}).to_string()})),
        of(ROOT, "mesh", json!({"mtls": {"mode": "PERMISSIVE"}})),
        of("default", "namespace", json!({"mtls": disable})),
        of("default", "endpoints", selector),
    ]
}
