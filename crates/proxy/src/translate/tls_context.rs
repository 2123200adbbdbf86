//! TLS contexts.

use std::sync::Arc;

use prost::Message as _;
use rustls::pki_types::ServerName;
use skysail_identity::{
    Identity, Live, NameMatch, Pattern, PeerCheck, Roots, SanKind, TlsSpec, tls::Version,
};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{
            DataSource, TransportSocket, api_config_source::ApiType, config_source::ConfigSourceSpecifier,
            data_source::Specifier, grpc_service::TargetSpecifier, transport_socket,
        },
        extensions::transport_sockets::tls::v3::{
            CertificateValidationContext, CommonTlsContext, DownstreamTlsContext, SdsSecretConfig,
            SubjectAltNameMatcher, TlsCertificate, UpstreamTlsContext,
            common_tls_context::ValidationContextType, subject_alt_name_matcher::SanType,
            tls_parameters::TlsProtocol,
        },
        r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
    },
    google::protobuf::Any,
};

use super::{At as _, Reject, Result, SecretName, SecretSource, Translator, flag};
use crate::config::tls::{ClientTls, ServerTls};

/// The name and configuration of a transport socket; `None` where there is none.
pub(super) fn typed_config(socket: Option<&TransportSocket>) -> Result<Option<(&str, &Any)>> {
    let Some(socket) = socket else { return Ok(None) };
    match &socket.config_type {
        Some(transport_socket::ConfigType::TypedConfig(any)) => Ok(Some((&socket.name, any))),
        None if socket.name == "envoy.transport_sockets.raw_buffer" => Ok(None),
        None => Err(Reject::new(format!("transport socket {:?} has no typed_config", socket.name))),
    }
}

/// A context for accepting connections.
pub(super) fn server(translator: Translator<'_>, proto: &DownstreamTlsContext) -> Result<Arc<ServerTls>> {
    let required = flag(proto.require_client_certificate).unwrap_or(false);
    translator.tls.server(proto.encode_to_vec(), || {
        let common = proto.common_tls_context.as_ref();
        let mut spec = spec(translator, common).at("common_tls_context")?;
        if spec.identities.is_empty() {
            return Err(Reject::new("a server needs a certificate").at_field("common_tls_context"));
        }
        match &mut spec.peer {
            Some(check) => check.required = required,
            None if required => {
                return Err(Reject::new(
                    "clients must have a certificate, but nothing says whose signature is good",
                )
                .at_field("common_tls_context"));
            }
            None => {}
        }
        Ok(spec)
    })
}

/// A context for making connections.
pub(super) fn client(
    translator: Translator<'_>,
    proto: &UpstreamTlsContext,
    host_name: bool,
) -> Result<Arc<ClientTls>> {
    let sni = match proto.sni.as_str() {
        "" => None,
        name => Some(server_name(name).at("sni")?),
    };
    let common = proto.common_tls_context.as_ref();
    let alpn = common.map(|common| common.alpn_protocols.as_slice()).unwrap_or_default();
    let alpn = alpn.iter().map(|protocol| protocol.as_bytes().into()).collect();
    // The server name is no part of the configuration, so clusters that differ in it alone share one.
    let mut key = common.map(prost::Message::encode_to_vec).unwrap_or_default();
    key.push(host_name.into());
    let config = translator.tls.client(key, || {
        let mut spec = spec(translator, common).at("common_tls_context")?;
        match &mut spec.peer {
            Some(check) => check.host_name = host_name,
            None if host_name => {
                return Err(
                    Reject::new("auto_san_validation needs a trusted_ca").at_field("common_tls_context")
                );
            }
            None => {}
        }
        Ok(spec)
    })?;
    Ok(Arc::new(ClientTls { config, sni, alpn }))
}

fn server_name(name: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).map_err(|_| Reject::new(format!("{name:?} is not a server name")))
}

fn spec(translator: Translator<'_>, common: Option<&CommonTlsContext>) -> Result<TlsSpec> {
    let Some(common) = common else { return Ok(TlsSpec::default()) };
    let mut spec = TlsSpec {
        alpn: common.alpn_protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect(),
        ..TlsSpec::default()
    };
    if let Some(params) = &common.tls_params {
        let version = |version| match version {
            TlsProtocol::TlsAuto => None,
            TlsProtocol::TlSv13 => Some(Version::Tls13),
            // Older versions are never spoken; a minimum below 1.2 means 1.2.
            TlsProtocol::TlSv10 | TlsProtocol::TlSv11 | TlsProtocol::TlSv12 => Some(Version::Tls12),
        };
        spec.min_version = version(params.tls_minimum_protocol_version()).unwrap_or_default();
        spec.max_version = version(params.tls_maximum_protocol_version());
    }
    for (index, certificate) in common.tls_certificates.iter().enumerate() {
        let identity = identity(certificate).at(format_args!("tls_certificates[{index}]"))?;
        spec.identities.push(Live::new(identity));
    }
    for (index, config) in common.tls_certificate_sds_secret_configs.iter().enumerate() {
        let name = secret(config).at(format_args!("tls_certificate_sds_secret_configs[{index}]"))?;
        spec.identities.push(translator.tls.identity(&name));
    }
    spec.peer = peer_check(translator, common)?;
    Ok(spec)
}

fn peer_check(translator: Translator<'_>, common: &CommonTlsContext) -> Result<Option<PeerCheck>> {
    let check = |roots, names| Some(PeerCheck { roots, names, host_name: false, required: false });
    Ok(match &common.validation_context_type {
        None => None,
        Some(ValidationContextType::ValidationContext(context)) => {
            let names = names(context).at("validation_context")?;
            match &context.trusted_ca {
                Some(source) => {
                    let roots = roots(source).at("validation_context.trusted_ca")?;
                    check(Live::new(roots), names)
                }
                None if names.is_empty() => None,
                None => {
                    return Err(Reject::new("names cannot be trusted without trusted_ca")
                        .at_field("validation_context"));
                }
            }
        }
        Some(ValidationContextType::ValidationContextSdsSecretConfig(config)) => {
            let name = secret(config).at("validation_context_sds_secret_config")?;
            check(translator.tls.roots(&name), Vec::new())
        }
        Some(ValidationContextType::CombinedValidationContext(combined)) => {
            let path = "combined_validation_context";
            let names = match &combined.default_validation_context {
                Some(context) if context.trusted_ca.is_some() => {
                    return Err(Reject::new("trusted_ca must come from the secret")
                        .at_field("default_validation_context")
                        .at_field(path));
                }
                Some(context) => names(context).at("default_validation_context").at(path)?,
                None => Vec::new(),
            };
            let config = combined.validation_context_sds_secret_config.as_ref();
            let config = config.ok_or_else(|| Reject::new("needs a secret").at_field(path))?;
            let name = secret(config).at("validation_context_sds_secret_config").at(path)?;
            check(translator.tls.roots(&name), names)
        }
        Some(_) => return Err(Reject::new("certificate providers are not supported")),
    })
}

/// The names that a peer's certificate may have.
#[expect(deprecated, reason = "Istio sends the older form")]
fn names(context: &CertificateValidationContext) -> Result<Vec<NameMatch>> {
    let mut names = Vec::new();
    for (index, matcher) in context.match_typed_subject_alt_names.iter().enumerate() {
        names.push(typed_name(matcher).at(format_args!("match_typed_subject_alt_names[{index}]"))?);
    }
    for (index, matcher) in context.match_subject_alt_names.iter().enumerate() {
        names.push(name(SanKind::Any, matcher).at(format_args!("match_subject_alt_names[{index}]"))?);
    }
    Ok(names)
}

fn typed_name(proto: &SubjectAltNameMatcher) -> Result<NameMatch> {
    let kind = match proto.san_type() {
        SanType::Email => SanKind::Email,
        SanType::Dns => SanKind::Dns,
        SanType::Uri => SanKind::Uri,
        SanType::IpAddress => SanKind::Ip,
        SanType::OtherName | SanType::Unspecified => {
            return Err(Reject::new("must be EMAIL, DNS, URI or IP_ADDRESS").at_field("san_type"));
        }
    };
    match &proto.matcher {
        Some(matcher) => name(kind, matcher).at("matcher"),
        None => Err(Reject::new("must be given").at_field("matcher")),
    }
}

fn name(kind: SanKind, matcher: &StringMatcher) -> Result<NameMatch> {
    let pattern = match &matcher.match_pattern {
        Some(MatchPattern::Exact(text)) => Pattern::Exact(text.clone()),
        Some(MatchPattern::Prefix(text)) => Pattern::Prefix(text.clone()),
        Some(MatchPattern::Suffix(text)) => Pattern::Suffix(text.clone()),
        Some(MatchPattern::Contains(text)) => Pattern::Contains(text.clone()),
        Some(MatchPattern::SafeRegex(pattern)) => {
            let anchored = format!("^(?:{})$", pattern.regex);
            Pattern::Regex(regex::Regex::new(&anchored).map_err(|error| Reject::new(error.to_string()))?)
        }
        _ => return Err(Reject::new("must say what it matches")),
    };
    Ok(NameMatch { kind, pattern, ignore_case: matcher.ignore_case })
}

/// A secret's name and source.
fn secret(config: &SdsSecretConfig) -> Result<SecretName> {
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

/// Certificate and key of a secret or of a context.
pub(super) fn identity(proto: &TlsCertificate) -> Result<Identity> {
    let missing = |what: &str| Reject::new("must be given").at_field(what);
    let chain = proto.certificate_chain.as_ref().ok_or_else(|| missing("certificate_chain"))?;
    let key = proto.private_key.as_ref().ok_or_else(|| missing("private_key"))?;
    let (chain, key) = (read(chain).at("certificate_chain")?, read(key).at("private_key")?);
    Identity::from_pem(&chain, &key).map_err(|error| Reject::new(error.to_string()))
}

/// Trusted certificates.
pub(super) fn roots(source: &DataSource) -> Result<Roots> {
    Roots::from_pem(&read(source)?).map_err(|error| Reject::new(error.to_string()))
}

/// The roots of a validation context that came as a secret.
#[expect(deprecated, reason = "the older form of alternative names must be looked for, too")]
pub(super) fn secret_roots(context: &CertificateValidationContext) -> Result<Roots> {
    if !context.match_typed_subject_alt_names.is_empty() || !context.match_subject_alt_names.is_empty() {
        return Err(Reject::new(
            "names to match are taken from the TLS context, not from the secret: move them there",
        ));
    }
    match &context.trusted_ca {
        Some(source) => roots(source).at("trusted_ca"),
        None => Err(Reject::new("must be given").at_field("trusted_ca")),
    }
}

/// The content of a data source.
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
        None => Err(Reject::new("must say where the content is")),
    }
}
