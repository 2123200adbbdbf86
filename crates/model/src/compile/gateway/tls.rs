//! TLS between gateways and their clients.
//!
//! Certificates come from Secrets through the control plane (`kubernetes://NAME`), from files through the proxy's
//! agent, or they are those of the mesh.

use skysail_xds::envoy::pb::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, CommonTlsContext, DownstreamTlsContext, SdsSecretConfig, TlsParameters,
    certificate_validation_context::TrustChainVerification,
    common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
    tls_parameters::TlsProtocol,
};

use crate::{
    api::{
        MeshConfig,
        gateway::{ServerTls, ServerTlsMode, TlsVersion},
        mesh_config::TlsDefaults,
    },
    compile::{
        filters::FilterSettings,
        pb::{boolean, core, matcher, matching, pack},
        tls,
    },
    world::{CONFIG_MAP, CREDENTIAL, ROOTS, SECRET},
};

/// Returns the TLS settings of a server of a Gateway. `tcp` is true if requests are not parsed.
pub(super) fn socket(setting: FilterSettings<'_>, from: &ServerTls, tcp: bool) -> core::TransportSocket {
    let mutual = from.mode == ServerTlsMode::IstioMutual;
    let exchanges = tcp && mutual && !setting.view.plain_envoy;
    let alpn: &[&str] = if exchanges { &[tls::PEER_EXCHANGE, "h2", "http/1.1"] } else { &["h2", "http/1.1"] };
    let common = CommonTlsContext {
        tls_params: parameters(setting.mesh, from),
        tls_certificate_sds_secret_configs: certificates(from),
        validation_context_type: validation(setting, from),
        alpn_protocols: alpn.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    let requires = matches!(from.mode, ServerTlsMode::Mutual | ServerTlsMode::IstioMutual);
    tls::tls_socket(pack(&DownstreamTlsContext {
        common_tls_context: Some(common),
        require_client_certificate: boolean(requires),
        ..Default::default()
    }))
}

/// Returns the names of the secrets that a server needs from the control plane.
pub(super) fn secrets(from: &ServerTls) -> Vec<String> {
    if from.mode.is_passthrough() || from.mode == ServerTlsMode::IstioMutual {
        return Vec::new();
    }
    from.credentials().into_iter().map(full).chain(roots(from)).collect()
}

fn full(name: &str) -> String {
    if name.starts_with(CREDENTIAL) || name.starts_with(CONFIG_MAP) {
        return name.to_owned();
    }
    format!("{SECRET}{}", name.strip_prefix(SECRET).unwrap_or(name))
}

/// Returns the name of the secret with the roots that verify clients.
fn roots(from: &ServerTls) -> Option<String> {
    let verifies = matches!(from.mode, ServerTlsMode::Mutual | ServerTlsMode::OptionalMutual);
    if !verifies {
        return None;
    }
    if !from.ca_cert_credential_name.is_empty() {
        return Some(full(&from.ca_cert_credential_name));
    }
    from.credentials().first().map(|name| format!("{}{ROOTS}", full(name)))
}

fn certificates(from: &ServerTls) -> Vec<SdsSecretConfig> {
    if from.has_mesh_certificate() {
        return vec![tls::secret("default")];
    }
    let credentials = from.credentials();
    if !credentials.is_empty() {
        return credentials.into_iter().map(|name| from_control_plane(full(name))).collect();
    }
    if !from.tls_certificates.is_empty() {
        let pairs = from.tls_certificates.iter();
        return pairs
            .map(|pair| tls::file(&format!("file-cert:{}~{}", pair.server_certificate, pair.private_key)))
            .collect();
    }
    vec![tls::file(&format!("file-cert:{}~{}", from.server_certificate, from.private_key))]
}

fn validation(setting: FilterSettings<'_>, from: &ServerTls) -> Option<ValidationContextType> {
    let exact = |name: &String| matching(matcher::string_matcher::MatchPattern::Exact(name.clone()));
    let verification = if from.accepts_untrusted() {
        TrustChainVerification::AcceptUntrusted
    } else {
        TrustChainVerification::VerifyTrustChain
    };
    #[expect(deprecated, reason = "what istiod sends; the typed form is not understood by older proxies")]
    let default = CertificateValidationContext {
        match_subject_alt_names: from.subject_alt_names.iter().map(exact).collect(),
        verify_certificate_spki: from.verify_certificate_spki.clone(),
        verify_certificate_hash: from.verify_certificate_hash.clone(),
        crl: from.has_list().then(|| tls::file_source(&from.ca_crl)),
        trust_chain_verification: verification as i32,
        ..Default::default()
    };
    let source = match roots(from) {
        _ if from.mode == ServerTlsMode::IstioMutual => tls::trust(setting.mesh),
        Some(name) => from_control_plane(name),
        None if from.mode.verifies_clients() && from.has_mesh_certificate() => tls::trust(setting.mesh),
        None if from.mode.verifies_clients() => tls::file(&format!("file-root:{}", from.root_file())),
        None if from.subject_alt_names.is_empty() => return None,
        None => return Some(ValidationContextType::ValidationContext(default)),
    };
    Some(ValidationContextType::CombinedValidationContext(CombinedCertificateValidationContext {
        default_validation_context: Some(default),
        validation_context_sds_secret_config: Some(source),
        ..Default::default()
    }))
}

/// Returns the limits of versions, cipher suites and curves; `None` for the proxy's defaults.
fn parameters(mesh: &MeshConfig, from: &ServerTls) -> Option<TlsParameters> {
    let version = |version: TlsVersion| match version {
        TlsVersion::Auto => TlsProtocol::TlsAuto,
        TlsVersion::V1_0 => TlsProtocol::TlSv10,
        TlsVersion::V1_1 => TlsProtocol::TlSv11,
        TlsVersion::V1_2 => TlsProtocol::TlSv12,
        TlsVersion::V1_3 => TlsProtocol::TlSv13,
    } as i32;
    // As in Istio, the defaults of the mesh do not apply to mutual TLS of the mesh.
    let has_defaults = from.mode != ServerTlsMode::IstioMutual;
    let default = if has_defaults { mesh.tls_defaults.clone() } else { TlsDefaults::default() };
    let or = |own: &[String], default: Vec<String>| if own.is_empty() { default } else { own.to_vec() };
    let oldest = match (from.min_protocol_version, default.min_protocol_version) {
        (TlsVersion::Auto, TlsVersion::Auto) => TlsVersion::Auto,
        (TlsVersion::Auto, TlsVersion::V1_3) => TlsVersion::V1_3,
        (TlsVersion::Auto, _) => TlsVersion::V1_2,
        (own, _) => own,
    };
    let made = TlsParameters {
        tls_minimum_protocol_version: version(oldest),
        tls_maximum_protocol_version: version(from.max_protocol_version),
        cipher_suites: crate::validate::known_ciphers(&or(&from.cipher_suites, default.cipher_suites)),
        ecdh_curves: or(&from.ecdh_curves, default.ecdh_curves),
        ..Default::default()
    };
    (made != TlsParameters::default()).then_some(made)
}

fn from_control_plane(name: String) -> SdsSecretConfig {
    SdsSecretConfig {
        name,
        sds_config: Some(core::ConfigSource {
            resource_api_version: core::ApiVersion::V3 as i32,
            config_source_specifier: Some(
                core::config_source::ConfigSourceSpecifier::Ads(Default::default()),
            ),
            ..Default::default()
        }),
    }
}
