//! Gateways and what they refer to: GatewayClass, Gateway, ListenerSet, ReferenceGrant, BackendTLSPolicy.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{GROUP, ObjectReference, ParentReference};
use crate::api::{
    Kind, Labels,
    kube::{NETWORK, gateway_port},
    namespace_selector::NamespaceSelector,
};

/// Option of a listener's TLS for gateways between networks.
pub const LISTENER_MODE: &str = "gateway.istio.io/listener-protocol";
/// Value of [`LISTENER_MODE`].
pub const AUTO_PASSTHROUGH: &str = "auto-passthrough";

/// `spec` of a GatewayClass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GatewayClass {
    /// Controller of the Gateways of this class.
    pub controller_name: String,
    /// Description, for people.
    pub description: String,
    /// Parameters of the controller; not supported.
    pub parameters_ref: Option<ObjectReference>,
}

/// `spec` of a Gateway.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct KubernetesGateway {
    /// Name of the GatewayClass.
    pub gateway_class_name: String,
    /// Listeners.
    pub listeners: Vec<Listener>,
    /// Addresses: a host names the Service of the proxies. Those of a gateway between networks are for clients of other
    /// networks.
    pub addresses: Vec<GatewayAddress>,
    /// ListenerSets that may add listeners.
    pub allowed_listeners: Option<AllowedListeners>,
    /// TLS that all listeners have in common.
    pub tls: Option<GatewayTls>,
    /// Settings of the proxies that are deployed on a cluster.
    pub infrastructure: Infrastructure,
    /// Routes without parents that use the Gateway; not supported.
    pub default_scope: Option<String>,
}

/// TLS that all listeners of a Gateway have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GatewayTls {
    /// TLS to clients.
    pub frontend: FrontendTls,
    /// TLS to backends; not supported.
    pub backend: BackendTls,
}

/// TLS of the listeners of a Gateway to clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FrontendTls {
    /// Settings for ports that `per_port` lacks.
    pub default: FrontendTlsConfig,
    /// Settings by port.
    pub per_port: Vec<FrontendTlsPort>,
}

/// TLS of the listeners of a port to clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FrontendTlsPort {
    /// Port.
    pub port: u32,
    /// Settings.
    pub tls: FrontendTlsConfig,
}

/// Settings of TLS to clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FrontendTlsConfig {
    /// Validation of the clients' certificates; unset: none.
    pub validation: Option<FrontendValidation>,
}

/// Validation of the certificates of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FrontendValidation {
    /// ConfigMaps or Secrets with roots.
    pub ca_certificate_refs: Vec<ObjectReference>,
    /// Which clients are accepted.
    pub mode: FrontendValidationMode,
}

/// Clients that a listener accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum FrontendValidationMode {
    /// Clients with a valid certificate.
    #[default]
    AllowValidOnly,
    /// All clients. As for OPTIONAL_MUTUAL, a certificate that is not valid is refused here.
    AllowInsecureFallback,
}

/// TLS of a Gateway to backends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendTls {
    /// Secret with the certificate and the key that the Gateway presents to servers with a BackendTLSPolicy.
    pub client_certificate_ref: Option<ObjectReference>,
}

/// Settings of the proxies that a controller deploys for a Gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Infrastructure {
    /// Labels of their objects.
    pub labels: Labels,
    /// Annotations of their objects.
    pub annotations: Labels,
    /// Parameters of the controller; not supported.
    pub parameters_ref: Option<ParametersReference>,
}

/// Reference to an object of the Gateway's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ParametersReference {
    /// API group; unset: the core group.
    pub group: Option<String>,
    /// Kind.
    pub kind: Option<String>,
    /// Name.
    pub name: String,
}

impl FrontendTls {
    /// Returns the validation of the clients of a port.
    pub(crate) fn of_port(&self, port: u32) -> Option<&FrontendValidation> {
        let own = self.per_port.iter().find(|of| of.port == port);
        own.map_or(&self.default, |of| &of.tls).validation.as_ref()
    }

    /// Returns the validations of all ports.
    pub(crate) fn validations(&self) -> impl Iterator<Item = &FrontendValidation> {
        let ports = self.per_port.iter().map(|of| &of.tls);
        std::iter::once(&self.default).chain(ports).filter_map(|of| of.validation.as_ref())
    }
}

/// Requested address of a Gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GatewayAddress {
    /// Type; unset: `IPAddress`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Value.
    pub value: String,
}

/// Type of an address without a type.
pub(crate) const IP_ADDRESS: &str = "IPAddress";

impl GatewayAddress {
    /// Returns the type.
    pub(crate) fn kind(&self) -> &str {
        self.kind.as_deref().unwrap_or(IP_ADDRESS)
    }
}

impl KubernetesGateway {
    /// Returns whether a Gateway with these labels is one between networks.
    pub(crate) fn is_between_networks(&self, labels: &Labels) -> bool {
        labels.contains_key(NETWORK) && self.listeners.iter().any(|of| of.joins_networks(labels))
    }
}

/// ListenerSets that may add listeners to a Gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AllowedListeners {
    /// Namespaces; unset: none.
    pub namespaces: Option<RouteNamespaces>,
}

/// Port of a Gateway, and the hosts on it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Listener {
    /// Name, unique within the object.
    pub name: String,
    /// Host, with an optional `*.`; unset: all.
    pub hostname: Option<String>,
    /// Port.
    pub port: u32,
    /// Protocol.
    pub protocol: Option<ListenerProtocol>,
    /// TLS of clients.
    pub tls: Option<ListenerTls>,
    /// Routes that may use the listener; unset: those of the same namespace.
    pub allowed_routes: Option<AllowedRoutes>,
}

impl Listener {
    /// Returns whether TLS ends at the gateway.
    pub(crate) fn terminates(&self) -> bool {
        self.tls.as_ref().is_none_or(|tls| tls.mode == ListenerTlsMode::Terminate)
    }

    /// Returns whether connections to the listener can be served at all.
    pub(crate) fn is_supported(&self) -> bool {
        // As in Istio, HTTPS without settings of TLS is not served.
        !self.kinds().is_empty() && (self.protocol != Some(ListenerProtocol::Https) || self.tls.is_some())
    }

    /// Returns the kinds of routes that the protocol supports.
    pub(crate) fn kinds(&self) -> &'static [Kind] {
        match self.protocol {
            Some(ListenerProtocol::Http | ListenerProtocol::Https) => &[Kind::HttpRoute, Kind::GrpcRoute],
            Some(ListenerProtocol::Tls) if self.terminates() => &[Kind::TlsRoute, Kind::TcpRoute],
            Some(ListenerProtocol::Tls) => &[Kind::TlsRoute],
            Some(ListenerProtocol::Tcp) => &[Kind::TcpRoute],
            Some(ListenerProtocol::Udp | ListenerProtocol::Other) | None => &[],
        }
    }

    /// Returns whether routes of a kind may use the listener.
    pub(crate) fn allows_kind(&self, kind: Kind) -> bool {
        let named = self.named_kinds();
        self.kinds().contains(&kind) && (named.is_empty() || named.iter().any(|of| of.is(kind)))
    }

    /// Returns the positions in `allowedRoutes.kinds` of kinds that the protocol does not support.
    pub(crate) fn unsupported_kinds(&self) -> impl Iterator<Item = usize> {
        let is_known = |of: &RouteGroupKind| self.kinds().iter().any(|kind| of.is(*kind));
        self.named_kinds().iter().enumerate().filter(move |(_, of)| !is_known(of)).map(|(index, _)| index)
    }

    fn named_kinds(&self) -> &[RouteGroupKind] {
        self.allowed_routes.as_ref().map_or(&[], |allowed| &allowed.kinds)
    }

    /// Returns whether the listener of a Gateway with these labels forwards connections of other networks. Source:
    /// `IsAutoPassthrough` of Istio.
    pub(crate) fn joins_networks(&self, labels: &Labels) -> bool {
        let Some(tls) = &self.tls else { return false };
        let is_marked = tls.options.get(LISTENER_MODE).is_some_and(|mode| mode == AUTO_PASSTHROUGH);
        let is_tls = self.protocol == Some(ListenerProtocol::Tls) && tls.mode == ListenerTlsMode::Passthrough;
        let has_port = || labels.contains_key(NETWORK) && self.port == u32::from(gateway_port(labels));
        is_tls && (is_marked || has_port())
    }
}

/// Protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum ListenerProtocol {
    /// HTTP in plain text.
    Http,
    /// HTTP over TLS.
    Https,
    /// TLS that is forwarded, or ends here.
    Tls,
    /// TCP.
    Tcp,
    /// UDP; not supported.
    Udp,
    /// Any other, such as `HBONE` of waypoints; not supported.
    Other,
}

impl From<String> for ListenerProtocol {
    fn from(name: String) -> Self {
        match name.as_str() {
            "HTTP" => Self::Http,
            "HTTPS" => Self::Https,
            "TLS" => Self::Tls,
            "TCP" => Self::Tcp,
            "UDP" => Self::Udp,
            _ => Self::Other,
        }
    }
}

/// TLS of a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ListenerTls {
    /// Mode; unset: Terminate.
    pub mode: ListenerTlsMode,
    /// Secrets with certificates and keys.
    pub certificate_refs: Vec<ObjectReference>,
    /// Options of implementations.
    pub options: BTreeMap<String, String>,
}

/// Mode of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum ListenerTlsMode {
    /// TLS ends at the gateway.
    #[default]
    Terminate,
    /// TLS is forwarded.
    Passthrough,
}

/// Routes that may use a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AllowedRoutes {
    /// Namespaces of the routes; unset: that of the Gateway.
    pub namespaces: Option<RouteNamespaces>,
    /// Kinds of routes; empty: those of the protocol.
    pub kinds: Vec<RouteGroupKind>,
}

/// Namespaces of objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RouteNamespaces {
    /// Selection.
    pub from: Option<NamespacesFrom>,
    /// Labels of the namespaces, with `from: Selector`.
    pub selector: Option<NamespaceSelector>,
}

/// Selection of namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum NamespacesFrom {
    /// All namespaces.
    All,
    /// Namespaces with certain labels.
    Selector,
    /// The namespace of the Gateway.
    #[default]
    Same,
    /// No namespace.
    None,
}

/// Kind of routes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RouteGroupKind {
    /// API group; unset: that of Gateway API.
    pub group: Option<String>,
    /// Kind.
    pub kind: String,
}

impl RouteGroupKind {
    /// Returns whether this is a kind of Gateway API.
    pub(crate) fn is(&self, kind: Kind) -> bool {
        self.group.as_deref().is_none_or(|group| group == GROUP) && self.kind == kind.as_str()
    }
}

/// `spec` of a ListenerSet.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ListenerSet {
    /// The Gateway.
    pub parent_ref: ParentReference,
    /// Listeners.
    pub listeners: Vec<Listener>,
}

/// `spec` of a ReferenceGrant: references into its namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ReferenceGrant {
    /// Referring kinds and namespaces, of which one suffices.
    pub from: Vec<GrantFrom>,
    /// Objects, of which one suffices.
    pub to: Vec<GrantTo>,
}

/// Kind and namespace of referring objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GrantFrom {
    /// API group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Namespace.
    pub namespace: String,
}

/// Kind and name of objects that may be referred to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GrantTo {
    /// API group; empty: the core group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Name; unset: all.
    pub name: Option<String>,
}

/// A reference across namespaces, to be compared with ReferenceGrants of the namespace of the object.
#[derive(Clone, Copy, Debug)]
pub struct Grant<'a> {
    /// API group and kind of the referring object.
    pub from: (&'a str, &'a str),
    /// Namespace of the referring object.
    pub namespace: &'a str,
    /// API group and kind of the object.
    pub to: (&'a str, &'a str),
    /// Name of the object.
    pub name: &'a str,
}

/// `spec` of a BackendTLSPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendTlsPolicy {
    /// Services.
    pub target_refs: Vec<ObjectReference>,
    /// Validation of the backends' certificates.
    pub validation: BackendValidation,
    /// Options of implementations.
    pub options: BTreeMap<String, String>,
}

/// Validation of the certificates of backends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendValidation {
    /// ConfigMaps with roots.
    pub ca_certificate_refs: Vec<ObjectReference>,
    /// Well-known roots: `System`.
    #[serde(rename = "wellKnownCACertificates")]
    pub well_known_ca_certificates: Option<String>,
    /// Server name, and name in the certificate.
    pub hostname: String,
    /// Names of which the certificate must have one, instead of the server name.
    pub subject_alt_names: Vec<SubjectAltName>,
}

/// Name in a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SubjectAltName {
    /// Type.
    #[serde(rename = "type")]
    pub kind: SanType,
    /// Host name.
    pub hostname: String,
    /// URI.
    pub uri: String,
}

/// Type of a name in a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum SanType {
    /// Host name.
    #[default]
    Hostname,
    /// URI.
    #[serde(rename = "URI")]
    Uri,
}

impl ReferenceGrant {
    /// Returns whether the grant permits a reference into its namespace.
    pub fn permits(&self, wanted: &Grant<'_>) -> bool {
        let from = |of: &GrantFrom| {
            (of.group.as_str(), of.kind.as_str()) == wanted.from && of.namespace == wanted.namespace
        };
        let to = |of: &GrantTo| {
            (of.group.as_str(), of.kind.as_str()) == wanted.to
                && of.name.as_deref().is_none_or(|name| name.is_empty() || name == wanted.name)
        };
        self.from.iter().any(from) && self.to.iter().any(to)
    }
}
