//! TLS of the mesh: certificates, validation, and their sources.
//!
//! Certificate `default` and roots `ROOTCA` come by secret discovery, never from the control plane. Their source is the
//! proxy's own static cluster `sds-grpc` (its agent, or the proxy itself): private keys do not leave the workload.

use std::collections::BTreeSet;

use skysail_core::SpiffeId;
use skysail_xds::envoy::pb::envoy::extensions::transport_sockets::{
    proxy_protocol::v3::ProxyProtocolUpstreamTransport,
    raw_buffer::v3::RawBuffer,
    tls::v3::{
        CertificateProviderPluginInstance, CertificateValidationContext, CommonTlsContext,
        DownstreamTlsContext, SdsSecretConfig, Secret, SpiffeCertValidatorConfig, TlsParameters,
        UpstreamTlsContext,
        common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
        secret::Type as SecretType,
        spiffe_cert_validator_config::TrustDomain,
        tls_parameters::TlsProtocol,
    },
};

use super::pb::{Any, boolean, core, matcher, matching, pack, seconds};
use crate::{
    api::{
        MeshConfig,
        destination_rule::{ClientTls, ClientTlsMode},
        gateway::TlsVersion,
    },
    world::INVALID,
};

/// Secret with the roots of each trust domain, from the control plane.
const BUNDLES: &str = "trust-bundles";
/// Prefix of the names of Kubernetes Secrets in secret discovery.
const KUBERNETES: &str = "kubernetes://";
/// Suffix of the name of the secret with only the CA certificates of a credential.
const CA_SUFFIX: &str = "-cacert";
/// ALPN of TCP between sidecars that exchange metadata.
pub(super) const PEER_EXCHANGE: &str = "istio-peer-exchange";
/// ALPN of TCP between sidecars.
pub(super) const ISTIO: &str = "istio";
/// ALPN of HTTP between sidecars.
pub(super) const ISTIO_HTTP: [&str; 3] = ["istio-http/1.0", "istio-http/1.1", "istio-h2"];
/// All ALPN of mutual TLS in the mesh.
pub(super) const ISTIO_ANY: [&str; 5] = [ISTIO, PEER_EXCHANGE, ISTIO_HTTP[0], ISTIO_HTTP[1], ISTIO_HTTP[2]];

/// Cipher suites below TLS 1.3, the same as Istio's.
const CIPHERS: [&str; 6] = [
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "AES256-GCM-SHA384",
    "AES128-GCM-SHA256",
];

/// Application protocol inside TLS to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpstreamProtocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
    /// TCP, or unknown.
    Other,
}

/// Returns mutual TLS to sidecars that present one of these identities or other names.
pub(super) fn upstream(
    mesh: &MeshConfig,
    identities: &BTreeSet<SpiffeId>,
    others: &[String],
    sni: &str,
    inside: UpstreamProtocol,
    plain_envoy: bool,
) -> core::TransportSocket {
    let alpn = if plain_envoy { plain_alpn(inside) } else { istio_alpn(inside) };
    let mut names = names_of(mesh.trust_domains(), identities);
    let others = others.iter().cloned();
    names.extend(others.map(|name| matching(matcher::string_matcher::MatchPattern::Exact(name))));
    tls_socket(pack(&UpstreamTlsContext {
        common_tls_context: Some(common(names, trust(mesh), &[], alpn)),
        sni: sni.to_owned(),
        ..Default::default()
    }))
}

/// Returns mutual TLS for gRPC clients. Their certificates come from the provider `default` in their bootstrap, which
/// Istio's agent writes (<https://github.com/grpc/proposal/blob/master/A29-xds-tls-security.md>).
pub(super) fn for_grpc(mesh: &MeshConfig, identities: &BTreeSet<SpiffeId>) -> core::TransportSocket {
    let provider = |name: &str| CertificateProviderPluginInstance {
        instance_name: "default".into(),
        certificate_name: name.to_owned(),
    };
    // ROOTCA holds the roots of the mesh's own authority, which do not verify other meshes.
    let domains = mesh.trust_domains().filter(|domain| !mesh.is_foreign(domain));
    #[expect(deprecated, reason = "what istiod sends and gRPC reads")]
    let validation = CertificateValidationContext {
        match_subject_alt_names: names_of(domains, identities),
        ca_certificate_provider_instance: Some(provider("ROOTCA")),
        ..Default::default()
    };
    let combined = CombinedCertificateValidationContext {
        default_validation_context: Some(validation),
        ..Default::default()
    };
    tls_socket(pack(&UpstreamTlsContext {
        common_tls_context: Some(CommonTlsContext {
            tls_certificate_provider_instance: Some(provider("default")),
            validation_context_type: Some(ValidationContextType::CombinedValidationContext(combined)),
            ..Default::default()
        }),
        ..Default::default()
    }))
}

/// Returns the names that peers with these identities present, in each of these trust domains.
fn names_of<'a>(
    domains: impl Iterator<Item = &'a String>,
    identities: &BTreeSet<SpiffeId>,
) -> Vec<matcher::StringMatcher> {
    let under = |domain: &String| {
        let domain = domain.clone();
        identities.iter().map(move |id| SpiffeId { trust_domain: domain.clone(), ..id.clone() }.to_string())
    };
    let mut names: Vec<String> = domains.flat_map(under).collect();
    names.sort_unstable();
    names.into_iter().map(|name| matching(matcher::string_matcher::MatchPattern::Exact(name))).collect()
}

/// Returns other TLS as a DestinationRule defines it. The proxy's agent reads files by name; the control plane serves
/// Secrets. `own` is the credential of a gateway that the settings do not name.
pub(super) fn client(
    mesh: &MeshConfig,
    settings: &ClientTls,
    own: Option<&str>,
    inside: UpstreamProtocol,
) -> core::TransportSocket {
    let names = settings.subject_alt_names.iter().cloned();
    let names = names.map(|name| matching(matcher::string_matcher::MatchPattern::Exact(name))).collect();
    let alpn: &[&str] = if inside == UpstreamProtocol::Http2 { &["h2"] } else { &[] };
    let credential = &settings.credential_name;
    let (pair, root) = if credential.is_empty() {
        let root = if settings.ca_certificates.is_empty() { "system" } else { &settings.ca_certificates };
        let pair = format!("file-cert:{}~{}", settings.client_certificate, settings.private_key);
        (file(&pair), file(&format!("file-root:{root}")))
    } else {
        (of_credential(credential), of_credential(&format!("{credential}{CA_SUFFIX}")))
    };
    let mut context = common(names, root, &[], alpn);
    let pair = own.map(of_credential).or((settings.mode == ClientTlsMode::Mutual).then_some(pair));
    context.tls_certificate_sds_secret_configs = pair.into_iter().collect();
    if credential == INVALID {
        context.tls_certificate_sds_secret_configs.clear();
        context.validation_context_type = Some(ValidationContextType::ValidationContext(no_certificate()));
    } else if settings.insecure_skip_verify == Some(true) {
        let unverified = ValidationContextType::ValidationContext(CertificateValidationContext::default());
        context.validation_context_type = credential.is_empty().then_some(unverified);
    } else if !settings.ca_crl.is_empty()
        && let Some(ValidationContextType::CombinedValidationContext(combined)) =
            &mut context.validation_context_type
        && let Some(validation) = &mut combined.default_validation_context
    {
        validation.crl = Some(file_source(&settings.ca_crl));
    }
    if let Some(params) = &mut context.tls_params {
        let defaults = &mesh.tls_defaults;
        params.ecdh_curves.clone_from(&defaults.ecdh_curves);
        params.cipher_suites = crate::validate::known_ciphers(&defaults.cipher_suites);
    }
    tls_socket(pack(&UpstreamTlsContext {
        common_tls_context: Some(context),
        sni: settings.sni.clone(),
        ..Default::default()
    }))
}

/// Returns a validation that no certificate satisfies: it pins the hash of none. A secret that does not exist would not
/// do: a proxy that waits for it keeps the former cluster in use, which may be without TLS.
fn no_certificate() -> CertificateValidationContext {
    CertificateValidationContext { verify_certificate_hash: vec!["0".repeat(64)], ..Default::default() }
}

/// Returns the content of a file, which the proxy reads itself.
pub(super) fn file_source(path: &str) -> core::DataSource {
    let specifier = Some(core::data_source::Specifier::Filename(path.to_owned()));
    core::DataSource { specifier, ..Default::default() }
}

/// Returns the configuration of a Secret that the control plane serves.
fn of_credential(name: &str) -> SdsSecretConfig {
    let name = if name.contains("://") { name.to_owned() } else { format!("{KUBERNETES}{name}") };
    SdsSecretConfig {
        name,
        sds_config: Some(core::ConfigSource {
            resource_api_version: core::ApiVersion::V3 as i32,
            config_source_specifier: Some(core::config_source::ConfigSourceSpecifier::Ads(
                core::AggregatedConfigSource::default(),
            )),
            ..Default::default()
        }),
    }
}

/// Returns TLS of inbound connections. `tcp` is true for connections that are not parsed as HTTP.
pub(super) fn downstream(mesh: &MeshConfig, tcp: bool, plain_envoy: bool) -> core::TransportSocket {
    let prefixes = mesh.trust_domains().map(|domain| format!("spiffe://{domain}/"));
    let names =
        prefixes.map(|prefix| matching(matcher::string_matcher::MatchPattern::Prefix(prefix))).collect();
    let alpn: &[&str] =
        if tcp && !plain_envoy { &[PEER_EXCHANGE, "h2", "http/1.1"] } else { &["h2", "http/1.1"] };
    let mut context = common(names, trust(mesh), &CIPHERS, alpn);
    if let Some(params) = &mut context.tls_params {
        let ciphers = crate::validate::known_ciphers(&mesh.mesh_mtls.cipher_suites);
        if !ciphers.is_empty() {
            params.cipher_suites = ciphers;
        }
        if mesh.mesh_mtls.min_protocol_version == TlsVersion::V1_3 {
            params.tls_minimum_protocol_version = TlsProtocol::TlSv13 as i32;
        }
    }
    tls_socket(pack(&DownstreamTlsContext {
        common_tls_context: Some(context),
        require_client_certificate: boolean(true),
        ..Default::default()
    }))
}

/// Returns a transport socket that sends the PROXY protocol header first.
pub(super) fn with_proxy_protocol(inner: core::TransportSocket, is_v2: bool) -> core::TransportSocket {
    let version = if is_v2 {
        core::proxy_protocol_config::Version::V2
    } else {
        core::proxy_protocol_config::Version::V1
    };
    let config = ProxyProtocolUpstreamTransport {
        config: Some(core::ProxyProtocolConfig { version: version as i32, ..Default::default() }),
        transport_socket: Some(inner),
        ..Default::default()
    };
    socket("envoy.transport_sockets.upstream_proxy_protocol", pack(&config))
}

/// Returns plain text.
pub(super) fn plaintext() -> core::TransportSocket {
    socket("envoy.transport_sockets.raw_buffer", pack(&RawBuffer::default()))
}

/// Returns the source of peers' roots: the proxy's own agent, along with its certificate. If roots are bound to trust
/// domains it is the control plane, since an agent has one list for all domains.
pub(super) fn trust(mesh: &MeshConfig) -> SdsSecretConfig {
    if !mesh.binds_roots() {
        return secret("ROOTCA");
    }
    SdsSecretConfig {
        name: BUNDLES.to_owned(),
        sds_config: Some(core::ConfigSource {
            initial_fetch_timeout: Some(seconds(0)),
            resource_api_version: core::ApiVersion::V3 as i32,
            config_source_specifier: Some(core::config_source::ConfigSourceSpecifier::Ads(
                core::AggregatedConfigSource::default(),
            )),
            ..Default::default()
        }),
    }
}

/// Returns the secret with the roots of each trust domain; `None` if roots are not bound to trust domains. `roots` are
/// those of the mesh's own authority.
pub(super) fn bundles(mesh: &MeshConfig, roots: &str) -> Option<Secret> {
    if !mesh.binds_roots() || roots.is_empty() {
        return None;
    }
    let domains = mesh.bundles(roots).into_iter().map(|(name, pem)| TrustDomain {
        name,
        trust_bundle: Some(core::DataSource {
            specifier: Some(core::data_source::Specifier::InlineString(pem)),
            ..Default::default()
        }),
        ..Default::default()
    });
    let validator = SpiffeCertValidatorConfig { trust_domains: domains.collect(), ..Default::default() };
    let context = CertificateValidationContext {
        custom_validator_config: Some(core::TypedExtensionConfig {
            name: "envoy.tls.cert_validator.spiffe".to_owned(),
            typed_config: Some(pack(&validator)),
        }),
        ..Default::default()
    };
    Some(Secret { name: BUNDLES.to_owned(), r#type: Some(SecretType::ValidationContext(context)) })
}

/// Returns the ALPN list of mutual TLS. The filter `istio.alpn` replaces it by the request's own protocol.
fn istio_alpn(inside: UpstreamProtocol) -> &'static [&'static str] {
    match inside {
        UpstreamProtocol::Http2 => &[PEER_EXCHANGE, ISTIO, "h2"],
        UpstreamProtocol::Http1 | UpstreamProtocol::Other => &[PEER_EXCHANGE, ISTIO],
    }
}

/// Returns the ALPN list for proxies without that filter, by the cluster's protocol. `istio-peer-exchange` must not be
/// offered: the peer would expect a first message that this proxy does not send.
fn plain_alpn(inside: UpstreamProtocol) -> &'static [&'static str] {
    match inside {
        UpstreamProtocol::Http1 => &["istio-http/1.1", ISTIO, "http/1.1"],
        UpstreamProtocol::Http2 => &["istio-h2", ISTIO, "h2"],
        UpstreamProtocol::Other => &[ISTIO],
    }
}

fn common(
    names: Vec<matcher::StringMatcher>,
    trust: SdsSecretConfig,
    ciphers: &[&str],
    alpn: &[&str],
) -> CommonTlsContext {
    #[expect(deprecated, reason = "what istiod sends; the typed form is not understood by older proxies")]
    let validation = CertificateValidationContext { match_subject_alt_names: names, ..Default::default() };
    CommonTlsContext {
        tls_params: Some(TlsParameters {
            tls_minimum_protocol_version: TlsProtocol::TlSv12 as i32,
            tls_maximum_protocol_version: TlsProtocol::TlSv13 as i32,
            cipher_suites: ciphers.iter().map(ToString::to_string).collect(),
            ..Default::default()
        }),
        tls_certificate_sds_secret_configs: vec![secret("default")],
        validation_context_type: Some(ValidationContextType::CombinedValidationContext(
            CombinedCertificateValidationContext {
                default_validation_context: Some(validation),
                validation_context_sds_secret_config: Some(trust),
                ..Default::default()
            },
        )),
        alpn_protocols: alpn.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

/// Returns the configuration of a secret from the proxy's own agent.
pub(super) fn secret(name: &str) -> SdsSecretConfig {
    use core::grpc_service::{EnvoyGrpc, TargetSpecifier};
    let agent = EnvoyGrpc { cluster_name: "sds-grpc".into(), ..Default::default() };
    let service =
        core::GrpcService { target_specifier: Some(TargetSpecifier::EnvoyGrpc(agent)), ..Default::default() };
    let api = core::ApiConfigSource {
        api_type: core::api_config_source::ApiType::Grpc as i32,
        transport_api_version: core::ApiVersion::V3 as i32,
        grpc_services: vec![service],
        set_node_on_first_message_only: true,
        ..Default::default()
    };
    SdsSecretConfig {
        name: name.to_owned(),
        sds_config: Some(core::ConfigSource {
            initial_fetch_timeout: Some(seconds(0)),
            resource_api_version: core::ApiVersion::V3 as i32,
            config_source_specifier: Some(core::config_source::ConfigSourceSpecifier::ApiConfigSource(api)),
            ..Default::default()
        }),
    }
}

/// Returns the configuration of a file, which the agent also serves as a secret.
pub(super) fn file(name: &str) -> SdsSecretConfig {
    let mut secret = secret(name);
    if let Some(source) = &mut secret.sds_config {
        source.initial_fetch_timeout = None;
    }
    secret
}

pub(super) fn tls_socket(config: Any) -> core::TransportSocket {
    socket("envoy.transport_sockets.tls", config)
}

fn socket(name: &str, config: Any) -> core::TransportSocket {
    core::TransportSocket {
        name: name.to_owned(),
        config_type: Some(core::transport_socket::ConfigType::TypedConfig(config)),
    }
}
