//! The mesh configuration: key `mesh` of ConfigMap `istio` in namespace `istio-system`.
//!
//! What stands here is what we act on; what Istio knows beyond it is named in a warning, so nothing is ignored in
//! silence. Settings that only concern how Istio itself is installed and run are accepted without a word.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, de::IgnoredAny};

use super::{
    destination_rule::{LocalityLb, TcpKeepalive},
    value::Duration,
    virtual_service::HttpRetry,
};

/// Where the mesh configuration stands.
pub const NAMESPACE: &str = "istio-system";
/// The ConfigMap.
pub const NAME: &str = "istio";
/// The key in it.
pub const KEY: &str = "mesh";
/// The ConfigMap of [`NAMESPACE`] that holds the addresses allocated to hosts of ServiceEntries: an address by host.
///
/// `skysail up` writes it, as Istio's controller writes `status.addresses`: its DNS server and the sidecars have to agree.
pub const ADDRESSES: &str = "skysail-addresses";

/// What a ConfigMap means to the mesh.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigMap {
    /// The mesh configuration.
    Mesh(Box<MeshConfig>),
    /// Addresses allocated to hosts of ServiceEntries.
    Addresses(BTreeMap<String, IpAddr>),
    /// Nothing.
    Other,
}

/// Settings for the whole mesh.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MeshConfig {
    /// Policies in this namespace hold for the mesh.
    pub root_namespace: String,
    /// The first part of every identity.
    pub trust_domain: String,
    /// Former trust domains, whose identities count as ours.
    pub trust_domain_aliases: Vec<String>,
    /// Roots beside those of the mesh's own authority.
    pub ca_certificates: Vec<CaCertificate>,
    /// Settings of the proxies.
    pub default_config: ProxyConfig,
    /// Where access logs go, `/dev/stdout`; empty: none. Without, the control plane's default
    /// ([`World::with_access_log`](crate::World::with_access_log)).
    pub access_log_file: Option<String>,
    /// Their format; empty: Istio's default.
    pub access_log_format: String,
    /// `TEXT` or `JSON`.
    pub access_log_encoding: LogEncoding,
    /// Sidecars use mutual TLS to all that take it.
    pub enable_auto_mtls: bool,
    /// What happens to traffic to places unknown.
    pub outbound_traffic_policy: OutboundTrafficPolicy,
    /// Retries where a VirtualService says nothing.
    pub default_http_retry_policy: Option<HttpRetry>,
    /// How long connecting may take.
    pub connect_timeout: Option<Duration>,
    /// How often proxies look names up whose answers do not say how long they hold.
    pub dns_refresh_rate: Duration,
    /// Keepalive of connections to endpoints.
    pub tcp_keepalive: Option<TcpKeepalive>,
    /// Which endpoints are near, where a rule does not say.
    pub locality_lb_setting: Option<LocalityLb>,
    /// How long to wait for the first bytes of an undeclared protocol.
    pub protocol_detection_timeout: Option<Duration>,
    /// Visibility of services that do not say.
    pub default_service_export_to: Vec<String>,
    /// Visibility of VirtualServices that do not say.
    pub default_virtual_service_export_to: Vec<String>,
    /// Visibility of DestinationRules that do not say.
    pub default_destination_rule_export_to: Vec<String>,
    /// How paths are cleaned before policies see them.
    pub path_normalization: PathNormalization,
    /// Metrics and logs by name.
    pub default_providers: IgnoredValue,
    /// The application's metrics are served along with the proxy's.
    pub enable_prometheus_merge: IgnoredValue,
    /// Tracing; off unless a Telemetry asks for it.
    pub enable_tracing: bool,
}

/// Roots beside those of the mesh's own authority. Source: `istio.mesh.v1alpha1.MeshConfig.CertificateData`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CaCertificate {
    /// The certificates.
    pub pem: String,
    /// Where else they are; not supported.
    pub spiffe_bundle_url: String,
    /// Signers of the Kubernetes API whose certificates they are for; not supported.
    pub cert_signers: Vec<String>,
    /// The trust domains they vouch for; empty: those that the mesh's own authority vouches for.
    pub trust_domains: Vec<String>,
}

impl CaCertificate {
    /// True if the certificates vouch for anybody.
    fn counts(&self) -> bool {
        !self.pem.is_empty() && self.cert_signers.is_empty()
    }
}

impl MeshConfig {
    /// The trust domains whose identities are accepted: the mesh's own, then its aliases.
    pub fn trust_domains(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.trust_domain).chain(&self.trust_domain_aliases)
    }

    /// The mesh's id in telemetry. Source: `istio.mesh.v1alpha1.ProxyConfig.mesh_id`.
    pub fn mesh_id(&self) -> &str {
        let id = &self.default_config.mesh_id;
        if id.is_empty() { &self.trust_domain } else { id }
    }

    /// True if an alias is another mesh's trust domain: it has roots of its own, and only they vouch for it.
    pub fn is_foreign(&self, domain: &str) -> bool {
        let names = |entry: &CaCertificate| entry.trust_domains.iter().any(|name| name == domain);
        domain != self.trust_domain && self.ca_certificates.iter().any(|entry| entry.counts() && names(entry))
    }

    /// True if roots are bound to trust domains.
    pub fn binds_roots(&self) -> bool {
        self.ca_certificates.iter().any(CaCertificate::counts)
    }

    /// The roots (PEM) of each trust domain that is accepted, where `roots` are those of the mesh's own authority.
    pub fn bundles(&self, roots: &str) -> BTreeMap<String, String> {
        let bundle = |domain: &String| {
            let foreign = self.is_foreign(domain);
            let vouches = |entry: &&CaCertificate| {
                entry.counts()
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

/// A setting that is known and has no effect here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredValue;

impl<'de> Deserialize<'de> for IgnoredValue {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// Settings of the proxies. Most of them are told to a proxy when it is started, not by the control plane.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyConfig {
    /// Where the control plane is.
    pub discovery_address: String,
    /// The mesh's id in telemetry; empty: the trust domain.
    pub mesh_id: String,
}

/// What happens to traffic to places unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OutboundTrafficPolicy {
    /// Which of the two.
    pub mode: OutboundMode,
    /// What happens to requests for hosts that a sidecar has not got and the control plane has not answered about. Not
    /// Istio's, which ignores it.
    pub unanswered_hosts: UnansweredHosts,
}

/// What happens to requests for hosts that the control plane has not answered about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum UnansweredHosts {
    /// They are refused with 503.
    #[default]
    Refuse,
    /// They are taken for hosts that the mesh does not have.
    CatchAll,
}

/// What happens to traffic to places unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum OutboundMode {
    /// Refused.
    RegistryOnly,
    /// Passed through.
    #[default]
    AllowAny,
}

/// How access logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum LogEncoding {
    /// By the format.
    #[default]
    Text,
    /// JSON objects.
    Json,
}

/// How paths are cleaned before policies see them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PathNormalization {
    /// How far.
    pub normalization: Normalization,
}

/// How far paths are cleaned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Normalization {
    /// As [`Self::Base`].
    #[default]
    Default,
    /// Not at all.
    None,
    /// RFC 3986: dot segments, backslashes.
    Base,
    /// And `//`.
    MergeSlashes,
    /// And `%2F`, `%5C`.
    DecodeAndMergeSlashes,
}

impl Default for MeshConfig {
    fn default() -> Self {
        Self {
            root_namespace: NAMESPACE.into(),
            trust_domain: "cluster.local".into(),
            trust_domain_aliases: Vec::new(),
            ca_certificates: Vec::new(),
            default_config: ProxyConfig::default(),
            access_log_file: None,
            access_log_format: String::new(),
            access_log_encoding: LogEncoding::Text,
            enable_auto_mtls: true,
            outbound_traffic_policy: OutboundTrafficPolicy::default(),
            default_http_retry_policy: None,
            locality_lb_setting: None,
            connect_timeout: None,
            dns_refresh_rate: Duration(std::time::Duration::from_secs(60)),
            tcp_keepalive: None,
            protocol_detection_timeout: None,
            default_service_export_to: Vec::new(),
            default_virtual_service_export_to: Vec::new(),
            default_destination_rule_export_to: Vec::new(),
            path_normalization: PathNormalization::default(),
            default_providers: IgnoredValue,
            enable_prometheus_merge: IgnoredValue,
            enable_tracing: false,
        }
    }
}
