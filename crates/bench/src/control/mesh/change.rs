//! Changes of the configuration while sidecars are connected: the objects, and which sidecars must receive the result.
//!
//! Most changes concern service 0 or its workload. Objects that a mesh does not have otherwise exist only while their
//! change is measured, so that they affect no other measurement.

use anyhow::Context as _;
use clap::ValueEnum as _;
use serde_json::{Value, json};

use super::{
    CHANGED, Mesh, Store, gateway_api, host,
    large::{EDGE, gateway_object, http_route, public_rule, rule, sidecar},
    namespace,
    objects::{namespace_object, pod, policy, route, service, slice},
};
use crate::{
    certificates,
    control::{
        message::Kind,
        sidecar::{Plan, Sidecar, Subscription},
    },
};

/// Service whose HTTPRoute changes.
const ROUTED: usize = 1;
/// Service whose workload has the Sidecar that changes. In a large mesh, it has no other Sidecar.
const RESTRICTED: usize = 3;
/// Gateway whose objects change.
pub(super) const GATEWAY: usize = 0;
/// Secret that changes.
pub(crate) const SECRET: &str = "changed";

/// Kind of change while sidecars are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Change {
    /// An endpoint of a service is added or removed.
    Endpoint,
    /// The timeout in a service's VirtualService changes.
    Route,
    /// The AuthorizationPolicy of a workload denies another path.
    Policy,
    /// A service is added or removed.
    Service,
    /// The timeout in a VirtualService changes; its host is no service.
    VirtualService,
    /// The timeout in a service's HTTPRoute changes.
    HttpRoute,
    /// The backend of a service's GRPCRoute gets another header.
    GrpcRoute,
    /// The settings in a service's DestinationRule change.
    DestinationRule,
    /// The host name in a service's BackendTLSPolicy changes.
    BackendTlsPolicy,
    /// A ServiceEntry is added or removed.
    ServiceEntry,
    /// The weight of a WorkloadEntry of a service changes.
    WorkloadEntry,
    /// The Sidecar of a workload allows another service.
    Sidecar,
    /// The PeerAuthentication of a workload gets another mode.
    PeerAuthentication,
    /// The RequestAuthentication of a workload changes.
    RequestAuthentication,
    /// The Telemetry of a workload changes.
    Telemetry,
    /// The EnvoyFilter of a workload gets another script.
    EnvoyFilter,
    /// The limit in the RateLimitPolicy of a workload changes.
    RateLimitPolicy,
    /// The label of a pod of a service changes; the pod has no sidecar.
    Pod,
    /// The label of a namespace changes, which affects no resource.
    Namespace,
    /// The number of threads in a ProxyConfig changes, which affects the start of proxies alone.
    ProxyConfig,
    /// The probe in a WorkloadGroup changes, which affects the start of proxies alone.
    WorkloadGroup,
    /// A ReferenceGrant permits another namespace, whose objects refer to nothing.
    ReferenceGrant,
    /// The connect timeout in the mesh configuration changes.
    MeshConfig,
    /// The Gateway of a gateway has another host; --mesh large.
    Gateway,
    /// The timeout in a VirtualService of a gateway changes; --mesh large.
    GatewayRoute,
    /// A Gateway of Gateway API has another host; --mesh large.
    KubernetesGateway,
    /// A ListenerSet has another host; --mesh large.
    ListenerSet,
    /// The weights in a TLSRoute of a gateway change; --mesh large.
    TlsRoute,
    /// The weights in a TCPRoute of a gateway change; --mesh large.
    TcpRoute,
    /// An Ingress has another path; --mesh large.
    Ingress,
    /// The certificate in a gateway's Secret changes; --mesh large and --tls.
    Secret,
}

impl Change {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns whether the change can be made: whether its gateways, and certificates for them, exist. A cluster may have a
    /// mesh configuration already, and may lack the kinds of Skysail.
    pub(crate) fn is_possible(self, is_large: bool, has_tls: bool, in_cluster: bool) -> bool {
        match self {
            Self::MeshConfig | Self::RateLimitPolicy => !in_cluster,
            // The mesh configuration names the gateway that serves Ingresses.
            Self::Ingress => is_large && !in_cluster,
            Self::Gateway
            | Self::GatewayRoute
            | Self::KubernetesGateway
            | Self::ListenerSet
            | Self::TlsRoute
            | Self::TcpRoute => is_large,
            Self::Secret => is_large && has_tls,
            _ => true,
        }
    }

    /// Returns the type of the resources that change.
    pub(crate) fn kind(self, plan: &Plan) -> Kind {
        match self {
            Self::Endpoint
            | Self::WorkloadEntry
            | Self::Pod
            | Self::Namespace
            | Self::ProxyConfig
            | Self::WorkloadGroup
            | Self::ReferenceGrant => Kind::Endpoint,
            Self::Route | Self::VirtualService | Self::HttpRoute | Self::GrpcRoute if plan.uses_vhds => {
                Kind::VirtualHost
            }
            Self::Route
            | Self::VirtualService
            | Self::HttpRoute
            | Self::GrpcRoute
            | Self::Gateway
            | Self::GatewayRoute
            | Self::KubernetesGateway
            | Self::ListenerSet
            | Self::Ingress => Kind::Route,
            Self::Service
            | Self::DestinationRule
            | Self::BackendTlsPolicy
            | Self::ServiceEntry
            | Self::Sidecar
            | Self::MeshConfig => Kind::Cluster,
            Self::Policy
            | Self::PeerAuthentication
            | Self::RequestAuthentication
            | Self::Telemetry
            | Self::RateLimitPolicy
            | Self::TlsRoute
            | Self::TcpRoute
            | Self::EnvoyFilter => Kind::Listener,
            Self::Secret => Kind::Secret,
        }
    }

    /// Returns whether a sidecar or gateway must receive the change.
    pub(crate) fn concerns(self, plan: &Plan, sidecar: Sidecar) -> bool {
        let is_gateway = sidecar.gateway(plan).is_some();
        // With on-demand subscriptions, no sidecar subscribes to a service that no workload uses.
        let sees_all = plan.subscription == Subscription::Mesh && !sidecar.is_restricted(plan);
        let sees = |service: usize| sidecar.sees(plan, service);
        match self {
            Self::Endpoint
            | Self::WorkloadEntry
            | Self::Pod
            | Self::DestinationRule
            | Self::BackendTlsPolicy => sees(CHANGED),
            Self::MeshConfig => true,
            Self::Route if !plan.uses_vhds => !is_gateway && (sees_all || sees(CHANGED)),
            Self::Route => !is_gateway && sees(CHANGED),
            Self::HttpRoute | Self::GrpcRoute => !is_gateway && sees(ROUTED.min(plan.services - 1)),
            Self::Service | Self::ServiceEntry => is_gateway || sees_all,
            Self::VirtualService => !is_gateway && sees_all,
            Self::Policy
            | Self::PeerAuthentication
            | Self::RequestAuthentication
            | Self::Telemetry
            | Self::RateLimitPolicy
            | Self::EnvoyFilter => sidecar.is_of(plan, CHANGED),
            Self::Sidecar => sidecar.is_of(plan, RESTRICTED.min(plan.services - 1)),
            Self::Namespace | Self::ProxyConfig | Self::WorkloadGroup | Self::ReferenceGrant => false,
            Self::Gateway
            | Self::GatewayRoute
            | Self::KubernetesGateway
            | Self::ListenerSet
            | Self::TlsRoute
            | Self::TcpRoute
            | Self::Ingress
            | Self::Secret => sidecar.gateway(plan) == Some(GATEWAY),
        }
    }

    /// Returns the name of the file with the object, and true if the file exists only while the change is measured.
    fn file(self) -> (&'static str, bool) {
        match self {
            Self::Endpoint => ("endpoint", false),
            Self::Route => ("route", false),
            Self::Policy => ("policy", false),
            Self::Service => ("service", false),
            Self::VirtualService => ("changed-virtual-service", true),
            Self::HttpRoute => ("changed-http-route", true),
            Self::GrpcRoute => ("changed-grpc-route", true),
            Self::DestinationRule => ("changed-destination-rule", true),
            Self::BackendTlsPolicy => ("changed-backend-tls-policy", true),
            Self::ServiceEntry => ("changed-service-entry", false),
            Self::WorkloadEntry => ("changed-workload-entry", true),
            Self::Sidecar => ("changed-sidecar", true),
            Self::PeerAuthentication => ("changed-peer-authentication", true),
            Self::RequestAuthentication => ("changed-request-authentication", true),
            Self::Telemetry => ("changed-telemetry", true),
            Self::EnvoyFilter => ("changed-envoy-filter", true),
            Self::RateLimitPolicy => ("changed-rate-limit-policy", true),
            Self::Pod => ("changed-pod", true),
            Self::Namespace => ("namespace", false),
            Self::ProxyConfig => ("changed-proxy-config", true),
            Self::WorkloadGroup => ("changed-workload-group", true),
            Self::ReferenceGrant => ("changed-reference-grant", true),
            Self::MeshConfig => ("changed-mesh-config", true),
            Self::Gateway => ("changed-gateway", true),
            Self::GatewayRoute => ("public", false),
            Self::KubernetesGateway => ("changed-kubernetes-gateway", true),
            Self::ListenerSet => ("changed-listener-set", true),
            Self::TlsRoute => ("changed-tls-route", true),
            Self::TcpRoute => ("changed-tcp-route", true),
            Self::Ingress => ("changed-ingress", true),
            Self::Secret => ("changed-secret", true),
        }
    }
}

impl Mesh {
    /// Writes the object that changes, if it does not exist yet. Returns whether it was written.
    pub(crate) fn begin(&mut self, change: Change) -> anyhow::Result<bool> {
        let (file, is_new) = change.file();
        if is_new {
            self.versions.remove(&change);
            self.put(file, self.objects(change, 0)?)?;
        }
        Ok(is_new)
    }

    /// Makes a change.
    pub(crate) fn change(&mut self, change: Change) -> anyhow::Result<()> {
        let version = self.versions.entry(change).or_default();
        *version += 1;
        let version = *version;
        self.put(change.file().0, self.objects(change, version)?)
    }

    /// Removes the object that [`Self::begin`] wrote. Returns whether it had written one.
    pub(crate) fn end(&mut self, change: Change) -> anyhow::Result<bool> {
        let (file, is_new) = change.file();
        if is_new {
            self.remove(file)?;
        }
        Ok(is_new)
    }

    /// Returns the objects of a change in a version, which differ from those of the version before.
    fn objects(&self, change: Change, version: usize) -> anyhow::Result<Vec<Value>> {
        let (namespaces, is_odd) = (self.namespaces, version % 2 == 1);
        Ok(match change {
            Change::Endpoint => {
                let mut changed = slice(CHANGED, namespaces, self.endpoints + usize::from(is_odd));
                // There is no pod of the further endpoint, and istiod ignores those of unknown pods.
                if let (Store::Cluster(_), Some(last)) =
                    (&self.store, changed["endpoints"].get_mut(self.endpoints).and_then(Value::as_object_mut))
                {
                    last.remove("targetRef");
                }
                vec![changed]
            }
            Change::Route => vec![route(version)],
            Change::Policy => vec![policy(version)],
            Change::Service => is_odd.then(|| service(self.services, namespaces)).into_iter().collect(),
            Change::VirtualService => vec![alias(version)],
            Change::HttpRoute => {
                let service = ROUTED.min(self.services - 1);
                vec![http_route(service, namespaces, "changed", "/changed/", 10 + version)]
            }
            Change::GrpcRoute => vec![grpc_route(ROUTED.min(self.services - 1), namespaces, version)],
            Change::DestinationRule => vec![destination_rule(version)],
            Change::BackendTlsPolicy => vec![backend_tls_policy(version)],
            Change::ServiceEntry => is_odd.then(service_entry).into_iter().collect(),
            Change::WorkloadEntry => vec![workload_entry(version)],
            Change::Sidecar => {
                let own = RESTRICTED.min(self.services - 1);
                let allowed = [own, (own + 1) % self.services];
                let allowed = &allowed[..1 + usize::from(is_odd)];
                vec![sidecar(own, namespaces, "changed", allowed)]
            }
            Change::PeerAuthentication => {
                let mode = if is_odd { "STRICT" } else { "PERMISSIVE" };
                let spec = json!({"selector": selector(), "mtls": {"mode": mode}});
                vec![of_workload("security.istio.io/v1", "PeerAuthentication", spec)]
            }
            Change::RequestAuthentication => {
                // The rule names no key set, so that none is fetched.
                let rule = json!({"issuer": "bench", "forwardOriginalToken": is_odd});
                let spec = json!({"selector": selector(), "jwtRules": [rule]});
                vec![of_workload("security.istio.io/v1", "RequestAuthentication", spec)]
            }
            Change::Telemetry => {
                let expression = format!("response.code >= {}", 400 + version % 100);
                let log = json!({"providers": [{"name": "envoy"}], "filter": {"expression": expression}});
                let spec = json!({"selector": selector(), "accessLogging": [log]});
                vec![of_workload("telemetry.istio.io/v1", "Telemetry", spec)]
            }
            Change::EnvoyFilter => vec![envoy_filter(version)],
            Change::RateLimitPolicy => {
                let limit = json!({"requests": 1_000 + version, "unit": "SECOND"});
                let spec = json!({"selector": selector(), "rules": [{"name": "all", "limit": limit}]});
                vec![of_workload("skysail.io/v1alpha1", "RateLimitPolicy", spec)]
            }
            Change::Pod => {
                let mut changed = pod(CHANGED, self.endpoints, namespaces);
                changed["metadata"]["labels"]["version"] = format!("v{version}").into();
                let mut own = slice(CHANGED, namespaces, self.endpoints + 1);
                own["metadata"]["name"] = format!("svc-{CHANGED}-2").into();
                vec![changed, own]
            }
            Change::Namespace => {
                let last = self.services.min(namespaces) - 1;
                vec![namespace_object(&namespace(last, namespaces), version)]
            }
            Change::ProxyConfig => {
                let spec = json!({"selector": selector(), "concurrency": 1 + version % 2});
                vec![of_workload("networking.istio.io/v1beta1", "ProxyConfig", spec)]
            }
            Change::WorkloadGroup => {
                let probe = json!({"periodSeconds": 1 + version, "httpGet": {"port": 80}});
                let template = json!({"serviceAccount": "machines"});
                let spec = json!({"template": template, "probe": probe});
                vec![of_workload("networking.istio.io/v1", "WorkloadGroup", spec)]
            }
            Change::ReferenceGrant => {
                let from = json!({
                    "group": "gateway.networking.k8s.io", "kind": "HTTPRoute",
                    "namespace": format!("absent-{version}"),
                });
                let spec = json!({"from": [from], "to": [{"group": "", "kind": "Service"}]});
                vec![of_workload("gateway.networking.k8s.io/v1", "ReferenceGrant", spec)]
            }
            Change::MeshConfig => vec![mesh_config(version)],
            Change::Gateway => gateway(version).into(),
            Change::GatewayRoute => vec![public_rule(CHANGED, namespaces, version)],
            Change::KubernetesGateway => gateway_api::gateway(version),
            Change::ListenerSet => gateway_api::listener_set(version),
            Change::TlsRoute => gateway_api::tls_route(version),
            Change::TcpRoute => gateway_api::tcp_route(version),
            Change::Ingress => gateway_api::ingress(version),
            Change::Secret => secret()?.into(),
        })
    }
}

/// Returns the selector of the workload of the service that changes.
fn selector() -> Value {
    json!({"matchLabels": {"app": format!("svc-{CHANGED}")}})
}

/// Returns an object in the namespace of the service that changes.
fn of_workload(version: &str, kind: &str, spec: Value) -> Value {
    let metadata = json!({"name": "changed", "namespace": namespace(CHANGED, 1)});
    json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})
}

fn alias(version: usize) -> Value {
    let spec = json!({
        "hosts": ["changed.internal.example"],
        "http": [{"timeout": format!("{}s", 10 + version), "route": [{"destination": {"host": host(CHANGED, 1)}}]}],
    });
    rule("changed-alias", &namespace(CHANGED, 1), &spec)
}

fn destination_rule(version: usize) -> Value {
    let pool = json!({"tcp": {"maxConnections": 1_000 + version}});
    let spec = json!({"host": host(CHANGED, 1), "trafficPolicy": {"connectionPool": pool}});
    of_workload("networking.istio.io/v1", "DestinationRule", spec)
}

fn backend_tls_policy(version: usize) -> Value {
    let target = json!({"group": "", "kind": "Service", "name": format!("svc-{CHANGED}")});
    let validation = json!({"hostname": format!("v{version}.example"), "wellKnownCACertificates": "System"});
    let spec = json!({"targetRefs": [target], "validation": validation});
    of_workload("gateway.networking.k8s.io/v1", "BackendTLSPolicy", spec)
}

fn grpc_route(service: usize, namespaces: usize, version: usize) -> Value {
    let name = format!("svc-{service}");
    let header = json!({"name": "x-version", "value": version.to_string()});
    let filter = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [header]}});
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "GRPCRoute",
        "metadata": {"name": "changed", "namespace": namespace(service, namespaces)},
        "spec": {
            "parentRefs": [{"group": "", "kind": "Service", "name": name}],
            "rules": [{
                "matches": [{"method": {"service": "bench.Changed"}}],
                "filters": [filter],
                "backendRefs": [{"name": name, "port": 80}],
            }],
        },
    })
}

fn mesh_config(version: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "istio", "namespace": "istio-system"},
        "data": {"mesh": format!("connectTimeout: {}ms", 1_000 + version)},
    })
}

fn service_entry() -> Value {
    let spec = json!({
        "hosts": ["changed.external.example"], "location": "MESH_EXTERNAL", "resolution": "STATIC",
        "addresses": ["192.0.2.1"], "endpoints": [{"address": "192.0.2.2"}],
        "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}],
    });
    of_workload("networking.istio.io/v1", "ServiceEntry", spec)
}

fn workload_entry(version: usize) -> Value {
    let labels = json!({"app": format!("svc-{CHANGED}")});
    let spec = json!({"address": "10.252.0.1", "labels": labels, "weight": 1 + version % 100});
    of_workload("networking.istio.io/v1", "WorkloadEntry", spec)
}

fn envoy_filter(version: usize) -> Value {
    let script = format!("function envoy_on_request(handle) local version = {version} end");
    let filter = json!({
        "name": "envoy.filters.network.http_connection_manager",
        "subFilter": {"name": "envoy.filters.http.router"},
    });
    let value = json!({
        "name": "envoy.filters.http.lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script},
        },
    });
    let patch = json!({
        "applyTo": "HTTP_FILTER",
        "match": {"context": "SIDECAR_INBOUND", "listener": {"filterChain": {"filter": filter}}},
        "patch": {"operation": "INSERT_BEFORE", "value": value},
    });
    let labels = json!({"labels": {"app": format!("svc-{CHANGED}")}});
    let spec = json!({"workloadSelector": labels, "configPatches": [patch]});
    of_workload("networking.istio.io/v1alpha3", "EnvoyFilter", spec)
}

/// Returns a second Gateway of the gateway, and a VirtualService for its hosts.
fn gateway(version: usize) -> [Value; 2] {
    let hosts = ["a.changed.example.com", "b.changed.example.com"];
    let server = json!({
        "port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": hosts[..1 + version % 2],
    });
    let spec = json!({
        "hosts": hosts, "gateways": [format!("{EDGE}/changed")],
        "http": [{"route": [{"destination": {"host": host(CHANGED, 1)}}]}],
    });
    [gateway_object(GATEWAY, "changed", &server), rule("changed-public", EDGE, &spec)]
}

/// Returns a Gateway with TLS, and its Secret with another certificate each time.
fn secret() -> anyhow::Result<[Value; 2]> {
    let authority = certificates::authority().context("cannot make a certificate")?;
    let server = json!({
        "port": {"number": 443, "name": "https", "protocol": "HTTPS"}, "hosts": ["tls.changed.example.com"],
        "tls": {"mode": "SIMPLE", "credentialName": SECRET},
    });
    let data = json!({"tls.crt": authority.pem(), "tls.key": authority.key().serialize_pem()});
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": EDGE},
        "stringData": data,
    });
    Ok([gateway_object(GATEWAY, "changed-tls", &server), secret])
}
