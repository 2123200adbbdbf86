//! Translates TLS contexts.

use std::{sync::Arc, time::Duration};

use rustls::pki_types::ServerName;
use skysail_identity::{Identity, Live, TlsSpec, tls::SessionResumption};
use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{
            DataSource, TransportSocket, api_config_source::ApiType, config_source::ConfigSourceSpecifier,
            data_source::Specifier, grpc_service::TargetSpecifier, transport_socket,
        },
        extensions::transport_sockets::tls::v3::{
            CommonTlsContext, DownstreamTlsContext, SdsSecretConfig, TlsCertificate, UpstreamTlsContext,
            common_tls_context::ValidationContextType, downstream_tls_context::SessionTicketKeysType,
        },
    },
    google::protobuf::Any,
};

use super::{
    At as _, Reject, Result, SecretName, SecretSource, Translator, flag, number, timeout, tls_params,
    validation,
};
use skysail_policy::config::tls::{ClientTls, ServerTls};

/// Returns name and configuration of a transport socket; `None` for plain text.
pub(super) fn typed_config(socket: Option<&TransportSocket>) -> Result<Option<(&str, &Any)>> {
    let Some(socket) = socket else { return Ok(None) };
    match &socket.config_type {
        Some(transport_socket::ConfigType::TypedConfig(any)) => Ok(Some((&socket.name, any))),
        None if socket.name == "envoy.transport_sockets.raw_buffer" => Ok(None),
        None => Err(Reject::new(format!("transport socket {:?} has no typed_config", socket.name))),
    }
}

/// Translates a downstream TLS context.
pub(super) fn server(translator: Translator<'_>, proto: &DownstreamTlsContext) -> Result<Arc<ServerTls>> {
    translator.tls.server(proto.to_vec(), || {
        let common = proto.common_tls_context.as_ref();
        let mut spec = spec(translator, common).at("common_tls_context")?;
        if spec.identities.is_empty() {
            return Err(Reject::new("a server needs a certificate").at_field("common_tls_context"));
        }
        let required = flag(proto.require_client_certificate).unwrap_or(false);
        match &mut spec.peer {
            // As in Envoy, SAN and fingerprint rules apply to every client, so they make a client certificate
            // mandatory.
            Some(check) => check.required = required || !check.names.is_empty() || !check.pins.is_empty(),
            None if required => {
                return Err(Reject::new(
                    "a required client certificate cannot be verified without trusted_ca: set a validation context",
                )
                .at_field("common_tls_context"));
            }
            None => {}
        }
        spec.client_order = proto.prefer_client_ciphers;
        spec.sessions.lifetime = session_lifetime(proto).at("session_timeout")?;
        if spec.peer.as_ref().is_some_and(|check| check.accepts_untrusted || check.only_pins) {
            // A session would be refused once the certificate with which it began has expired.
            spec.sessions.lifetime = Duration::ZERO;
        }
        Ok(spec)
    })
}

/// Returns the lifetime of resumable sessions, at most one hour.
fn session_lifetime(proto: &DownstreamTlsContext) -> Result<Duration> {
    if let Some(SessionTicketKeysType::DisableStatelessSessionResumption(true)) =
        &proto.session_ticket_keys_type
    {
        return Ok(Duration::ZERO);
    }
    let max = SessionResumption::default().lifetime;
    let wanted = timeout(proto.session_timeout.as_ref(), None)?.map(|time| time.as_secs());
    // Fractions of seconds are ignored. BoringSSL uses its default for zero.
    Ok(wanted.filter(|seconds| *seconds > 0).map_or(max, |seconds| max.min(Duration::from_secs(seconds))))
}

/// Translates an upstream TLS context.
pub(super) fn client(
    translator: Translator<'_>,
    proto: &UpstreamTlsContext,
    host_name: bool,
) -> Result<Arc<ClientTls>> {
    let sni = server_name(&proto.sni, host_name).at("sni")?;
    let common = proto.common_tls_context.as_ref();
    let alpn = common.map(|common| common.alpn_protocols.as_slice()).unwrap_or_default();
    let alpn = alpn.iter().map(|protocol| protocol.as_bytes().into()).collect();
    // The key excludes the server name, so clusters that differ only in it share a context.
    let mut key = common.map(prost::Message::encode_to_vec).unwrap_or_default();
    key.push(host_name.into());
    let kept = number(proto.max_session_keys);
    key.extend(kept.iter().flat_map(|kept| kept.to_be_bytes()));
    let config = translator.tls.client(key, || {
        let mut spec = spec(translator, common).at("common_tls_context")?;
        match &mut spec.peer {
            Some(check) if check.accepts_untrusted => {
                let reject = Reject::new("ACCEPT_UNTRUSTED is supported for clients only");
                return Err(reject.at_field("trust_chain_verification").at_field("common_tls_context"));
            }
            Some(check) => check.host_name = host_name,
            None if host_name => {
                return Err(
                    Reject::new("auto_san_validation needs a trusted_ca").at_field("common_tls_context")
                );
            }
            None => {}
        }
        if let Some(kept) = kept {
            spec.sessions.kept = spec.sessions.kept.min(kept as usize);
        }
        if spec.peer.as_ref().is_some_and(|check| check.only_pins) {
            // A session would be refused once the certificate with which it began has expired.
            spec.sessions.kept = 0;
        }
        Ok(spec)
    })?;
    let secrets = common.map(secret_names).unwrap_or_default();
    Ok(Arc::new(ClientTls { config, sni, alpn, secrets }))
}

/// Returns the names of the secrets of a context.
fn secret_names(common: &CommonTlsContext) -> Box<[Box<str>]> {
    let roots = match &common.validation_context_type {
        Some(ValidationContextType::ValidationContextSdsSecretConfig(config)) => Some(config),
        Some(ValidationContextType::CombinedValidationContext(combined)) => {
            combined.validation_context_sds_secret_config.as_ref()
        }
        _ => None,
    };
    let all = common.tls_certificate_sds_secret_configs.iter().chain(roots);
    all.map(|config| config.name.as_str().into()).collect()
}

/// Returns the SNI to send; `None` if it is no DNS name (RFC 6066, section 3). Istio's name for a host that is an
/// address, `outbound_.80_._.192.0.2.1`, is none. Such a name is refused if the server's certificate is verified by
/// name.
fn server_name(name: &str, verifies_name: bool) -> Result<Option<ServerName<'static>>> {
    match ServerName::try_from(name.to_owned()) {
        Ok(name) => Ok(Some(name)),
        Err(_) if name.is_empty() || !verifies_name => Ok(None),
        Err(_) => Err(Reject::new(format!("{name:?} is not a server name"))),
    }
}

fn spec(translator: Translator<'_>, common: Option<&CommonTlsContext>) -> Result<TlsSpec> {
    let Some(common) = common else { return Ok(TlsSpec::default()) };
    let mut spec = TlsSpec {
        alpn: common.alpn_protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect(),
        ..TlsSpec::default()
    };
    if let Some(params) = &common.tls_params {
        tls_params::apply(translator, params, &mut spec).at("tls_params")?;
    }
    if !common.tls_certificates.is_empty() && !common.tls_certificate_sds_secret_configs.is_empty() {
        return Err(Reject::new("must not be given beside tls_certificates")
            .at_field("tls_certificate_sds_secret_configs"));
    }
    for (index, certificate) in common.tls_certificates.iter().enumerate() {
        let identity = identity(certificate).at(format_args!("tls_certificates[{index}]"))?;
        spec.identities.push(Live::new(identity));
    }
    for (index, config) in common.tls_certificate_sds_secret_configs.iter().enumerate() {
        let name = secret(config).at(format_args!("tls_certificate_sds_secret_configs[{index}]"))?;
        spec.identities.push(translator.tls.identity(&name));
    }
    spec.peer = validation::peer_check(translator, common)?;
    Ok(spec)
}

/// Returns a secret's name and source.
pub(super) fn secret(config: &SdsSecretConfig) -> Result<SecretName> {
    let source = match &config.sds_config {
        None => SecretSource::Static,
        Some(config) => match &config.config_source_specifier {
            Some(ConfigSourceSpecifier::Ads(_)) => SecretSource::Ads,
            Some(ConfigSourceSpecifier::ApiConfigSource(api)) => {
                if !matches!(api.api_type(), ApiType::Grpc | ApiType::DeltaGrpc) {
                    return Err(Reject::new("must be GRPC or DELTA_GRPC")
                        .at_field("sds_config.api_config_source.api_type"));
                }
                let service = api.grpc_services.first().and_then(|service| service.target_specifier.as_ref());
                match service {
                    Some(TargetSpecifier::EnvoyGrpc(target)) => {
                        SecretSource::Cluster(target.cluster_name.as_str().into())
                    }
                    _ => {
                        return Err(Reject::new("must name a cluster by envoy_grpc")
                            .at_field("sds_config.api_config_source.grpc_services"));
                    }
                }
            }
            Some(ConfigSourceSpecifier::PathConfigSource(file)) => {
                if file.path.is_empty() {
                    return Err(Reject::new("must be given").at_field("sds_config.path_config_source.path"));
                }
                let watched = file.watched_directory.as_ref().map(|folder| folder.path.as_str().into());
                SecretSource::File { path: file.path.as_str().into(), watched }
            }
            _ => {
                return Err(Reject::new("must be ads, api_config_source or path_config_source")
                    .at_field("sds_config"));
            }
        },
    };
    if config.name.is_empty() {
        return Err(Reject::new("must be given").at_field("name"));
    }
    Ok(SecretName { source, name: config.name.as_str().into() })
}

/// Returns certificate and key of a secret or of a context.
pub(super) fn identity(proto: &TlsCertificate) -> Result<Identity> {
    let missing = |what: &str| Reject::new("must be given").at_field(what);
    let chain = proto.certificate_chain.as_ref().ok_or_else(|| missing("certificate_chain"))?;
    let key = proto.private_key.as_ref().ok_or_else(|| missing("private_key"))?;
    let (chain, key) = (read(chain).at("certificate_chain")?, read(key).at("private_key")?);
    Identity::from_pem(&chain, &key).map_err(|error| Reject::new(error.to_string()))
}

/// Returns the content of a data source.
pub(super) fn read(source: &DataSource) -> Result<Vec<u8>> {
    match &source.specifier {
        Some(Specifier::Filename(path)) => {
            std::fs::read(path).map_err(|error| Reject::new(format!("{path}: {error}")).at_field("filename"))
        }
        Some(Specifier::InlineBytes(bytes)) => Ok(bytes.clone()),
        Some(Specifier::InlineString(text)) => Ok(text.clone().into_bytes()),
        Some(Specifier::EnvironmentVariable(name)) => match std::env::var(name) {
            Ok(value) => Ok(value.into_bytes()),
            Err(error) => Err(Reject::new(format!("{name}: {error}")).at_field("environment_variable")),
        },
        None => Err(Reject::new("must contain a filename or inline content")),
    }
}
