//! The mesh configuration: key `mesh` of ConfigMap `istio` in namespace `istio-system`.
//!
//! The types hold the settings that the mesh uses. A warning names each other setting of Istio, so that none is ignored
//! silently. Settings that only concern how Istio itself is installed and run cause no warning.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, de::IgnoredAny};

use super::{
    destination_rule::{ClientTls, ConnectionPool, LocalityLb, OutlierDetection, TcpKeepalive, ZoneAwareLb},
    entry_visibility::EntryVisibilityPolicies,
    extension_provider::ExtensionProvider,
    gateway::TlsVersion,
    mesh_networks::MeshNetworks,
    namespace_selector::NamespaceSelector,
    proxy_config::ProxySettings,
    value::Duration,
    virtual_service::HttpRetry,
};

/// Namespace of the mesh configuration.
pub const NAMESPACE: &str = "istio-system";
/// Name of its ConfigMap.
pub const NAME: &str = "istio";
/// Key in the ConfigMap.
pub const KEY: &str = "mesh";
/// ConfigMap of [`NAMESPACE`] with the addresses allocated to hosts of ServiceEntries, by host.
///
/// `skysail up` writes it, as Istio's controller writes `status.addresses`, because its DNS server and the sidecars
/// must use the same addresses.
pub const ADDRESSES: &str = "skysail-addresses";

/// Returns whether a ConfigMap holds settings of the mesh.
pub(crate) fn is_own(namespace: &str, name: &str) -> bool {
    namespace == NAMESPACE && (name == NAME || name == ADDRESSES)
}

/// Content of a ConfigMap.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigMap {
    /// Mesh configuration.
    Mesh(Box<MeshConfig>),
    /// Addresses allocated to hosts of ServiceEntries.
    Addresses(BTreeMap<String, IpAddr>),
    /// Certificates (PEM) in key `ca.crt`, to which a BackendTLSPolicy may refer.
    Roots(std::sync::Arc<str>),
    /// Other content, which does not affect the mesh.
    Other,
}

/// Settings for the whole mesh.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MeshConfig {
    /// Namespace whose policies apply to the whole mesh.
    pub root_namespace: String,
    /// Trust domain, the first part of every identity.
    pub trust_domain: String,
    /// Former trust domains, whose identities are accepted as the mesh's own.
    pub trust_domain_aliases: Vec<String>,
    /// Roots in addition to those of the mesh's own authority.
    pub ca_certificates: Vec<CaCertificate>,
    /// Settings of the proxies.
    pub default_config: ProxySettings,
    /// Access log file, such as `/dev/stdout`; empty disables the log. Unset: the control plane's default
    /// ([`World::with_access_log`](crate::World::with_access_log)).
    pub access_log_file: Option<String>,
    /// Access log format; empty: Istio's default.
    pub access_log_format: String,
    /// Access log encoding, `TEXT` or `JSON`.
    pub access_log_encoding: LogEncoding,
    /// Whether sidecars use mutual TLS to all endpoints that accept it.
    pub enable_auto_mtls: bool,
    /// Policy for traffic to unknown destinations.
    pub outbound_traffic_policy: OutboundTrafficPolicy,
    /// Address at which workloads receive inbound connections.
    pub inbound_traffic_policy: InboundTrafficPolicy,
    /// Namespaces whose services and routing objects are used: those that one of these selects. Empty: all.
    pub discovery_selectors: Vec<NamespaceSelector>,
    /// Retry policy of routes without one.
    pub default_http_retry_policy: Option<HttpRetry>,
    /// Connect timeout.
    pub connect_timeout: Option<Duration>,
    /// Interval of DNS lookups by proxies if the answer has no TTL.
    pub dns_refresh_rate: Duration,
    /// TCP keep-alive of connections to endpoints.
    pub tcp_keepalive: Option<TcpKeepalive>,
    /// Locality load balancing of services whose rule has no setting.
    pub locality_lb_setting: Option<LocalityLb>,
    /// Class of the Ingresses that are served, by the annotation `kubernetes.io/ingress.class`.
    pub ingress_class: String,
    /// Which Ingresses are served.
    pub ingress_controller_mode: IngressControllerMode,
    /// Value of the label `istio` of the proxies that serve Ingresses; empty: by `ingressService`.
    pub ingress_selector: String,
    /// Service of the proxies that serve Ingresses.
    pub ingress_service: String,
    /// Whether HTTP/1.1 requests are sent as HTTP/2 to ports that are declared to speak HTTP.
    pub h2_upgrade_policy: H2UpgradePolicy,
    /// Pattern of the names of inbound clusters in statistics; empty: the name of the cluster.
    pub inbound_cluster_stat_name: String,
    /// Pattern of the names of outbound clusters in statistics; empty: the name of the cluster.
    pub outbound_cluster_stat_name: String,
    /// TLS of the mesh.
    #[serde(rename = "meshMTLS")]
    pub mesh_mtls: TlsDefaults,
    /// TLS with peers outside the mesh.
    pub tls_defaults: TlsDefaults,
    /// Load balancing between the zones of a region of services whose rule has no setting.
    pub zone_aware_lb_setting: Option<ZoneAwareLb>,
    /// Connection pools and outlier detection of clusters whose rule has none.
    pub default_traffic_policy: DefaultTrafficPolicy,
    /// Timeout of protocol detection on undeclared ports.
    pub protocol_detection_timeout: Option<Duration>,
    /// Visibility of services that set none.
    pub default_service_export_to: Vec<String>,
    /// Upper bounds of the visibility of ServiceEntries.
    pub service_entry_visibility: EntryVisibilityPolicies,
    /// Visibility of VirtualServices that set none.
    pub default_virtual_service_export_to: Vec<String>,
    /// Visibility of DestinationRules that set none.
    pub default_destination_rule_export_to: Vec<String>,
    /// Normalization of paths before policies see them.
    pub path_normalization: PathNormalization,
    /// Default providers of metrics, traces and logs.
    pub default_providers: DefaultProviders,
    /// Providers that policies and Telemetries name.
    pub extension_providers: Vec<ExtensionProvider>,
    /// Whether the metrics of workloads are served along with those of their proxies.
    pub enable_prometheus_merge: bool,
    /// Whether requests are traced without a Telemetry, if the proxy's own configuration names a collector.
    pub enable_tracing: bool,
    /// Whether listeners have no access log for connections without a matching filter chain.
    pub disable_envoy_listener_log: bool,
    /// Networks, from a key of their own.
    #[serde(skip)]
    pub networks: MeshNetworks,
}

/// Settings of clusters whose DestinationRule has none. Source: `istio.mesh.v1alpha1.MeshConfig.DefaultTrafficPolicy`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DefaultTrafficPolicy {
    /// Limits and timeouts of connections.
    pub connection_pool: Option<ConnectionPool>,
    /// Ejection of failing endpoints.
    pub outlier_detection: Option<OutlierDetection>,
}

/// Which Ingresses are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum IngressControllerMode {
    /// None by the annotation.
    Off,
    /// Those of the class, and those without one.
    Default,
    /// Those of the class.
    #[default]
    Strict,
}

/// Whether HTTP/1.1 requests are sent as HTTP/2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum H2UpgradePolicy {
    /// They are not.
    #[default]
    DoNotUpgrade,
    /// They are, unless a DestinationRule says otherwise.
    Upgrade,
}

/// Parameters of TLS. Source: `istio.mesh.v1alpha1.MeshConfig.TLSConfig`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TlsDefaults {
    /// Oldest version.
    pub min_protocol_version: TlsVersion,
    /// Curves of ECDH; empty: the defaults of the proxy.
    pub ecdh_curves: Vec<String>,
    /// Cipher suites below TLS 1.3; empty: the defaults of the proxy.
    pub cipher_suites: Vec<String>,
}

/// Roots in addition to those of the mesh's own authority. Source: `istio.mesh.v1alpha1.MeshConfig.CertificateData`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CaCertificate {
    /// Certificates.
    pub pem: String,
    /// URL of a SPIFFE bundle; not supported.
    pub spiffe_bundle_url: String,
    /// Kubernetes signers whose certificates they verify; not supported.
    pub cert_signers: Vec<String>,
    /// Trust domains that they verify; empty: those of the mesh's own authority.
    pub trust_domains: Vec<String>,
}

impl CaCertificate {
    /// Returns whether the certificates are used at all.
    fn is_used(&self) -> bool {
        !self.pem.is_empty() && self.cert_signers.is_empty()
    }
}

impl MeshConfig {
    /// Returns the trust domains whose identities are accepted: the mesh's own, then its aliases.
    pub fn trust_domains(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.trust_domain).chain(&self.trust_domain_aliases)
    }

    /// Returns whether a default of the mesh prefers the endpoints of the client's node.
    pub fn prefers_node(&self) -> bool {
        self.locality_lb_setting.as_ref().is_some_and(LocalityLb::prefers_node)
            || self.zone_aware_lb_setting.as_ref().is_some_and(ZoneAwareLb::prefers_node)
    }

    /// Returns the mesh's id in telemetry. Source: `istio.mesh.v1alpha1.ProxyConfig.mesh_id`.
    pub fn mesh_id(&self) -> &str {
        let id = &self.default_config.mesh_id;
        if id.is_empty() { &self.trust_domain } else { id }
    }

    /// Returns whether an alias is another mesh's trust domain: only roots of its own verify it.
    pub fn is_foreign(&self, domain: &str) -> bool {
        let names = |entry: &CaCertificate| entry.trust_domains.iter().any(|name| name == domain);
        domain != self.trust_domain
            && self.ca_certificates.iter().any(|entry| entry.is_used() && names(entry))
    }

    /// Returns whether roots are bound to trust domains.
    pub fn binds_roots(&self) -> bool {
        self.ca_certificates.iter().any(CaCertificate::is_used)
    }

    /// Returns the roots (PEM) of each accepted trust domain. `roots` are those of the mesh's own authority.
    pub fn bundles(&self, roots: &str) -> BTreeMap<String, String> {
        let bundle = |domain: &String| {
            let foreign = self.is_foreign(domain);
            let vouches = |entry: &&CaCertificate| {
                entry.is_used()
                    && match entry.trust_domains.as_slice() {
                        [] => !foreign,
                        names => names.contains(domain),
                    }
            };
            let own = (!foreign).then_some(roots);
            let more = self.ca_certificates.iter().filter(vouches).map(|entry| entry.pem.as_str());
            let mut bundle = String::new();
            for pem in own.into_iter().chain(more) {
                bundle.push_str(pem.trim_end());
                bundle.push('\n');
            }
            (domain.clone(), bundle)
        };
        self.trust_domains().map(bundle).collect()
    }
}

/// Default providers, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DefaultProviders {
    /// Providers of metrics; unset: `prometheus`.
    pub metrics: Option<Vec<String>>,
    /// Providers of traces; the first is used.
    pub tracing: Vec<String>,
    /// Providers of access logs.
    pub access_logging: Vec<String>,
}

impl DefaultProviders {
    /// Returns the providers of metrics.
    pub fn metrics(&self) -> impl Iterator<Item = &str> {
        let default = self.metrics.is_none().then_some("prometheus");
        self.metrics.iter().flatten().map(String::as_str).chain(default)
    }
}

/// A setting that is known and has no effect here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredValue;

impl<'de> Deserialize<'de> for IgnoredValue {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// Policy for traffic to unknown destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OutboundTrafficPolicy {
    /// Mode.
    pub mode: OutboundMode,
    /// TLS to unknown hosts of HTTP; only with [`OutboundMode::AllowAnyDynamicDns`].
    pub tls: Option<ClientTls>,
    /// Treatment of requests for a host that the sidecar does not have and for which the control plane has not
    /// answered. Not a field of Istio, which ignores it.
    pub unanswered_hosts: UnansweredHosts,
}

/// Treatment of requests for hosts for which the control plane has not answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum UnansweredHosts {
    /// Refuses them with 503.
    #[default]
    Refuse,
    /// Treats them as requests for hosts outside the mesh.
    CatchAll,
}

/// Mode of the policy for traffic to unknown destinations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum OutboundMode {
    /// Refuses it.
    RegistryOnly,
    /// Passes it through.
    #[default]
    AllowAny,
    /// Passes connections through. Requests of HTTP go to the addresses that the proxy resolves for their host.
    AllowAnyDynamicDns,
}

/// Policy for inbound connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct InboundTrafficPolicy {
    /// Mode.
    pub mode: InboundMode,
}

/// Address at which workloads receive inbound connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum InboundMode {
    /// The address of the pod.
    #[default]
    Passthrough,
    /// Loopback.
    Localhost,
}

/// Encoding of access logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum LogEncoding {
    /// Text in the configured format.
    #[default]
    Text,
    /// JSON objects.
    Json,
}

/// Normalization of paths before policies see them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PathNormalization {
    /// Level.
    pub normalization: Normalization,
}

/// Level of path normalization.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Normalization {
    /// The same as [`Self::Base`].
    #[default]
    Default,
    /// None.
    None,
    /// RFC 3986: dot segments, backslashes.
    Base,
    /// Also `//`.
    MergeSlashes,
    /// Also `%2F` and `%5C`.
    DecodeAndMergeSlashes,
}

impl Default for MeshConfig {
    fn default() -> Self {
        Self {
            root_namespace: NAMESPACE.into(),
            trust_domain: "cluster.local".into(),
            trust_domain_aliases: Vec::new(),
            ca_certificates: Vec::new(),
            default_config: ProxySettings::default(),
            access_log_file: None,
            access_log_format: String::new(),
            access_log_encoding: LogEncoding::Text,
            enable_auto_mtls: true,
            outbound_traffic_policy: OutboundTrafficPolicy::default(),
            inbound_traffic_policy: InboundTrafficPolicy::default(),
            discovery_selectors: Vec::new(),
            default_http_retry_policy: None,
            locality_lb_setting: None,
            zone_aware_lb_setting: None,
            connect_timeout: None,
            dns_refresh_rate: Duration(std::time::Duration::from_secs(60)),
            tcp_keepalive: None,
            ingress_class: "istio".into(),
            ingress_controller_mode: IngressControllerMode::default(),
            ingress_selector: String::new(),
            ingress_service: String::new(),
            h2_upgrade_policy: H2UpgradePolicy::default(),
            inbound_cluster_stat_name: String::new(),
            outbound_cluster_stat_name: String::new(),
            mesh_mtls: TlsDefaults::default(),
            tls_defaults: TlsDefaults::default(),
            default_traffic_policy: DefaultTrafficPolicy::default(),
            protocol_detection_timeout: None,
            default_service_export_to: Vec::new(),
            service_entry_visibility: EntryVisibilityPolicies::default(),
            default_virtual_service_export_to: Vec::new(),
            default_destination_rule_export_to: Vec::new(),
            path_normalization: PathNormalization::default(),
            default_providers: DefaultProviders::default(),
            extension_providers: Vec::new(),
            enable_prometheus_merge: true,
            enable_tracing: true,
            disable_envoy_listener_log: false,
            networks: MeshNetworks::default(),
        }
    }
}
