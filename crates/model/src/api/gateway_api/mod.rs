//! Kinds of Gateway API (`gateway.networking.k8s.io`), version 1.6. Absent fields have the defaults of the API's CRDs.

mod gateways;
mod routes;

use serde::Deserialize;

pub use gateways::{
    AllowedListeners, AllowedRoutes, BackendTlsPolicy, BackendValidation, GatewayAddress, GatewayClass,
    Grant, GrantFrom, GrantTo, KubernetesGateway, Listener, ListenerProtocol, ListenerSet, ListenerTls,
    ListenerTlsMode, NamespaceSelector, NamespacesFrom, ReferenceGrant, RouteGroupKind, RouteNamespaces,
    SanType, SelectorOperator, SelectorRequirement, SubjectAltName,
};
pub use routes::{
    Cors, Filter, FilterType, Fraction, GrpcMatch, GrpcMethod, GrpcRoute, GrpcRule, HeaderFilter,
    HeaderValue, HttpMatch, HttpRoute, HttpRule, L4Rule, MatchType, Mirror, NamedMatch, PathMatch,
    PathMatchType, PathModifier, PathModifierType, Redirect, TcpRoute, Timeouts, TlsRoute, UrlRewrite,
};

/// API group of Gateway API.
pub const GROUP: &str = "gateway.networking.k8s.io";

/// API group of Istio's networking kinds.
pub const ISTIO_GROUP: &str = "networking.istio.io";

/// Reference of a route to a Gateway, a ListenerSet, a Service or a ServiceEntry.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ParentReference {
    /// API group; unset: that of Gateway API.
    pub group: Option<String>,
    /// Kind; unset: Gateway.
    pub kind: Option<String>,
    /// Namespace; unset: that of the route.
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
    /// Name of a listener, or of a port of a Service; unset: all.
    pub section_name: Option<String>,
    /// Port of listeners or of the Service; unset: all.
    pub port: Option<u32>,
}

/// Reference to a backend of requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendRef {
    /// API group; unset: the core group.
    pub group: Option<String>,
    /// Kind; unset: Service.
    pub kind: Option<String>,
    /// Name.
    pub name: String,
    /// Namespace; unset: that of the route. Another one requires a ReferenceGrant.
    pub namespace: Option<String>,
    /// Port of the Service.
    pub port: Option<u32>,
    /// Share of requests; unset: 1.
    pub weight: Option<i32>,
    /// Filters for this backend alone.
    pub filters: Vec<Filter>,
}

/// Reference to an object, such as a Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ObjectReference {
    /// API group; unset: the core group.
    pub group: Option<String>,
    /// Kind; unset: depends on the field.
    pub kind: Option<String>,
    /// Name.
    pub name: String,
    /// Namespace; unset: that of the referring object.
    pub namespace: Option<String>,
    /// Name of a port of the object.
    pub section_name: Option<String>,
}

impl ParentReference {
    /// Returns the API group and the kind.
    pub fn group_kind(&self) -> (&str, &str) {
        (self.group.as_deref().unwrap_or(GROUP), self.kind.as_deref().unwrap_or("Gateway"))
    }
}

impl BackendRef {
    /// Returns the API group and the kind.
    pub fn group_kind(&self) -> (&str, &str) {
        (self.group.as_deref().unwrap_or_default(), self.kind.as_deref().unwrap_or("Service"))
    }

    /// Returns the share of requests.
    pub fn share(&self) -> i32 {
        self.weight.unwrap_or(1)
    }
}
