//! Typed objects of the Kubernetes and Istio kinds that the mesh uses.
//!
//! Istio's kinds mirror Istio's API field by field. Kubernetes' kinds are reduced to the fields that a mesh uses, since
//! a large mesh has tens of thousands of Pods.

pub mod connection_settings;
pub mod destination_rule;
pub mod entry_visibility;
pub mod envoy_filter;
pub mod extension;
pub mod extension_provider;
pub mod gateway;
pub mod gateway_api;
pub mod ingress;
pub mod kube;
pub mod locality;
pub(crate) mod manifest;
pub mod mesh_config;
pub mod mesh_networks;
pub mod namespace_selector;
pub mod own_settings;
pub mod proxy_config;
pub mod proxy_tracing;
pub mod rate_limit;
pub mod secret;
pub mod security;
pub mod service_entry;
pub mod sidecar;
pub mod telemetry;
pub mod value;
pub mod virtual_service;
pub mod workload;

use std::{collections::BTreeMap, fmt, sync::Arc};

pub use destination_rule::{DestinationRule, Subset, TrafficPolicy};
pub use envoy_filter::EnvoyFilter;
pub use extension::{TrafficExtension, WasmPlugin};
pub use gateway::Gateway;
pub use gateway_api::{
    BackendTlsPolicy, GatewayClass, GrpcRoute, HttpRoute, ListenerSet, ReferenceGrant, TcpRoute, TlsRoute,
};
pub use ingress::{Ingress, IngressClass};
pub use kube::{EndpointSlice, Node, Pod, Protocol, Service, ServicePort, Template};
pub use mesh_config::{ConfigMap, MeshConfig};
pub use proxy_config::ProxyConfig;
pub use rate_limit::{RateLimitPolicy, RateLimitTarget};
pub use secret::Secret;
pub use security::{AuthorizationPolicy, MtlsMode, PeerAuthentication, RequestAuthentication};
pub use service_entry::{EntryHost, Resolution, ServiceEntry};
pub use sidecar::Sidecar;
pub use telemetry::Telemetry;
pub use value::{Duration, StringMatch};
pub use virtual_service::VirtualService;
pub use workload::{Address, EntryEndpoint, WorkloadEntry, WorkloadGroup};

/// Labels or annotations.
pub type Labels = BTreeMap<String, String>;

/// Returns whether `labels` has every label of `selector`; the empty selector matches all.
pub fn selects(selector: &Labels, labels: &Labels) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Defines the kinds: name as written in YAML and API group.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $written:literal of $group:literal,)*) => {
        /// Kinds that the mesh uses.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the kind as written in YAML.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => $written,)*
                }
            }

            /// Returns the API group; empty for the core group.
            pub const fn group(self) -> &'static str {
                match self {
                    $(Self::$kind => $group,)*
                }
            }
        }
    };
}

kinds! {
    /// `v1` Namespace.
    Namespace = "Namespace" of "",
    /// `v1` Node.
    Node = "Node" of "",
    /// `v1` Service.
    Service = "Service" of "",
    /// `v1` ServiceAccount.
    ServiceAccount = "ServiceAccount" of "",
    /// `v1` Pod.
    Pod = "Pod" of "",
    /// `v1` Secret.
    Secret = "Secret" of "",
    /// `v1` ConfigMap.
    ConfigMap = "ConfigMap" of "",
    /// `apps/v1` Deployment.
    Deployment = "Deployment" of "apps",
    /// `apps/v1` StatefulSet.
    StatefulSet = "StatefulSet" of "apps",
    /// `apps/v1` DaemonSet.
    DaemonSet = "DaemonSet" of "apps",
    /// `apps/v1` ReplicaSet.
    ReplicaSet = "ReplicaSet" of "apps",
    /// `batch/v1` Job.
    Job = "Job" of "batch",
    /// `batch/v1` CronJob.
    CronJob = "CronJob" of "batch",
    /// `discovery.k8s.io/v1` EndpointSlice.
    EndpointSlice = "EndpointSlice" of "discovery.k8s.io",
    /// `networking.k8s.io/v1` Ingress.
    Ingress = "Ingress" of "networking.k8s.io",
    /// `networking.k8s.io/v1` IngressClass.
    IngressClass = "IngressClass" of "networking.k8s.io",
    /// `networking.istio.io` VirtualService.
    VirtualService = "VirtualService" of "networking.istio.io",
    /// `networking.istio.io` DestinationRule.
    DestinationRule = "DestinationRule" of "networking.istio.io",
    /// `networking.istio.io` ServiceEntry.
    ServiceEntry = "ServiceEntry" of "networking.istio.io",
    /// `networking.istio.io` Gateway.
    Gateway = "Gateway" of "networking.istio.io",
    /// `networking.istio.io` Sidecar.
    Sidecar = "Sidecar" of "networking.istio.io",
    /// `networking.istio.io` WorkloadEntry.
    WorkloadEntry = "WorkloadEntry" of "networking.istio.io",
    /// `networking.istio.io` WorkloadGroup.
    WorkloadGroup = "WorkloadGroup" of "networking.istio.io",
    /// `networking.istio.io` ProxyConfig.
    ProxyConfig = "ProxyConfig" of "networking.istio.io",
    /// `networking.istio.io` EnvoyFilter.
    EnvoyFilter = "EnvoyFilter" of "networking.istio.io",
    /// `security.istio.io` PeerAuthentication.
    PeerAuthentication = "PeerAuthentication" of "security.istio.io",
    /// `security.istio.io` RequestAuthentication.
    RequestAuthentication = "RequestAuthentication" of "security.istio.io",
    /// `security.istio.io` AuthorizationPolicy.
    AuthorizationPolicy = "AuthorizationPolicy" of "security.istio.io",
    /// `telemetry.istio.io` Telemetry.
    Telemetry = "Telemetry" of "telemetry.istio.io",
    /// `gateway.networking.k8s.io` GatewayClass.
    GatewayClass = "GatewayClass" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` Gateway.
    KubernetesGateway = "Gateway" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` ListenerSet.
    ListenerSet = "ListenerSet" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` HTTPRoute.
    HttpRoute = "HTTPRoute" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` GRPCRoute.
    GrpcRoute = "GRPCRoute" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` TLSRoute.
    TlsRoute = "TLSRoute" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` TCPRoute.
    TcpRoute = "TCPRoute" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` ReferenceGrant.
    ReferenceGrant = "ReferenceGrant" of "gateway.networking.k8s.io",
    /// `gateway.networking.k8s.io` BackendTLSPolicy.
    BackendTlsPolicy = "BackendTLSPolicy" of "gateway.networking.k8s.io",
    /// `extensions.istio.io` WasmPlugin.
    WasmPlugin = "WasmPlugin" of "extensions.istio.io",
    /// `extensions.istio.io` TrafficExtension.
    TrafficExtension = "TrafficExtension" of "extensions.istio.io",
    /// `skysail.io` RateLimitPolicy.
    RateLimitPolicy = "RateLimitPolicy" of "skysail.io",
}

impl Kind {
    /// Returns the field in which an object that makes Pods names their service account.
    pub(crate) const fn account_field(self) -> &'static str {
        match self {
            Self::CronJob => "spec.jobTemplate.spec.template.spec.serviceAccountName",
            _ => "spec.template.spec.serviceAccountName",
        }
    }

    /// Returns whether objects of the kind make Pods from a template.
    pub(crate) const fn makes_pods(self) -> bool {
        matches!(
            self,
            Self::Deployment
                | Self::StatefulSet
                | Self::DaemonSet
                | Self::ReplicaSet
                | Self::Job
                | Self::CronJob
        )
    }

    /// Returns whether the kind restricts requests.
    pub const fn is_policy(self) -> bool {
        matches!(self, Self::PeerAuthentication | Self::AuthorizationPolicy | Self::RequestAuthentication)
    }

    /// Returns whether a fallback restricts requests while an object of the kind is refused.
    pub const fn has_fallback(self) -> bool {
        self.is_policy() || matches!(self, Self::WasmPlugin | Self::TrafficExtension)
    }

    /// Returns whether objects of the kind have a namespace.
    pub const fn is_namespaced(self) -> bool {
        !matches!(self, Self::Namespace | Self::Node | Self::GatewayClass | Self::IngressClass)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Kind, namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Kind.
    pub kind: Kind,
    /// Namespace; empty for kinds without one.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// Metadata that all objects have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Namespace; empty for kinds without one.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Labels; objects of one file with equal labels share them.
    pub labels: Arc<Labels>,
    /// Annotations that affect the mesh (`*istio.io/*`).
    pub annotations: Labels,
    /// `creationTimestamp` in seconds since 1970, if present.
    pub created: Option<i64>,
}

impl Meta {
    /// Returns whether a policy is only evaluated and not enforced (annotation `istio.io/dry-run`).
    pub fn is_dry_run(&self) -> bool {
        self.annotations.get(security::DRY_RUN).is_some_and(|value| security::is_true(value))
    }
}

/// An object of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Typed<T> {
    /// Name, namespace, labels.
    pub meta: Meta,
    /// Specification.
    pub spec: T,
}

/// Defines the objects. The first list has the kinds of Kubernetes itself, the second the kinds whose specification
/// determines the kind.
macro_rules! objects {
    ({$($kube:ident($kube_spec:ty),)*} {$($kind:ident($spec:ty),)*}) => {
        /// An object of any kind. Clones share the content.
        #[derive(Clone, Debug, PartialEq)]
        #[expect(missing_docs, reason = "each variant is described at its kind")]
        pub enum Object {
            $($kube(Arc<Typed<$kube_spec>>),)*
            $($kind(Arc<Typed<$spec>>),)*
            /// An object that makes Pods.
            Template(Arc<Typed<Template>>),
        }

        impl Object {
            /// Returns the kind.
            pub fn kind(&self) -> Kind {
                match self {
                    $(Self::$kube(_) => Kind::$kube,)*
                    $(Self::$kind(_) => Kind::$kind,)*
                    Self::Template(object) => object.spec.kind,
                }
            }

            /// Returns the metadata.
            pub fn meta(&self) -> &Meta {
                match self {
                    $(Self::$kube(object) => &object.meta,)*
                    $(Self::$kind(object) => &object.meta,)*
                    Self::Template(object) => &object.meta,
                }
            }

            /// Returns the metadata; `None` if the object is shared.
            pub(crate) fn meta_mut(&mut self) -> Option<&mut Meta> {
                Some(match self {
                    $(Self::$kube(object) => &mut Arc::get_mut(object)?.meta,)*
                    $(Self::$kind(object) => &mut Arc::get_mut(object)?.meta,)*
                    Self::Template(object) => &mut Arc::get_mut(object)?.meta,
                })
            }
        }

        $(impl From<Typed<$spec>> for Object {
            fn from(object: Typed<$spec>) -> Self {
                Self::$kind(Arc::new(object))
            }
        })*
    };
}

objects! {
    {
        Namespace(()),
        Node(Node),
        Service(Service),
        ServiceAccount(()),
        Pod(Pod),
        Secret(Secret),
        EndpointSlice(EndpointSlice),
        ConfigMap(ConfigMap),
    }
    {
        VirtualService(VirtualService),
        DestinationRule(DestinationRule),
        ServiceEntry(ServiceEntry),
        Gateway(Gateway),
        Sidecar(Sidecar),
        WorkloadEntry(WorkloadEntry),
        WorkloadGroup(WorkloadGroup),
        ProxyConfig(ProxyConfig),
        EnvoyFilter(EnvoyFilter),
        PeerAuthentication(PeerAuthentication),
        RequestAuthentication(RequestAuthentication),
        AuthorizationPolicy(AuthorizationPolicy),
        Telemetry(Telemetry),
        Ingress(Ingress),
        IngressClass(IngressClass),
        GatewayClass(GatewayClass),
        KubernetesGateway(gateway_api::KubernetesGateway),
        ListenerSet(ListenerSet),
        HttpRoute(HttpRoute),
        GrpcRoute(GrpcRoute),
        TlsRoute(TlsRoute),
        TcpRoute(TcpRoute),
        ReferenceGrant(ReferenceGrant),
        BackendTlsPolicy(BackendTlsPolicy),
        WasmPlugin(WasmPlugin),
        TrafficExtension(TrafficExtension),
        RateLimitPolicy(RateLimitPolicy),
    }
}

impl Object {
    /// Returns the key of the object.
    pub fn key(&self) -> ObjectKey {
        let meta = self.meta();
        ObjectKey { kind: self.kind(), namespace: meta.namespace.clone(), name: meta.name.clone() }
    }
}
