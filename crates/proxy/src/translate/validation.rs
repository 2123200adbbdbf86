//! Translates `CertificateValidationContext`, which defines the accepted peers, from a context, a secret, or
//! both.
//!
//! Envoy merges a secret's context into the default one. Here the trust anchors (`trusted_ca`,
//! `custom_validator_config` and the `crl` beside them) may come from the secret; all other rules come from the
//! TLS context.

use std::sync::Arc;

use skysail_identity::{Crls, Live, NameMatch, Pattern, PeerCheck, Pin, Roots, SanKind};
use skysail_xds::envoy::pb::envoy::{
    config::core::v3::{DataSource, data_source::Specifier},
    extensions::transport_sockets::tls::v3::{
        CertificateValidationContext, CommonTlsContext, SpiffeCertValidatorConfig, SubjectAltNameMatcher,
        certificate_validation_context::TrustChainVerification, common_tls_context::ValidationContextType,
        subject_alt_name_matcher::SanType,
    },
    r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
};

use super::{
    At as _, Reject, Result, SecretName, SecretSource, Translator, number,
    tls_context::{read, secret},
    unpack,
};

/// Returns the peer check of a context; `None` if peers are not verified.
pub(super) fn peer_check(translator: Translator<'_>, common: &CommonTlsContext) -> Result<Option<PeerCheck>> {
    let check = match &common.validation_context_type {
        None => return Ok(None),
        Some(ValidationContextType::ValidationContext(context)) => {
            let in_context = |reject: Reject| reject.at_field("validation_context");
            if context.trusted_ca.is_none() && context.custom_validator_config.is_none() {
                return match (has_rules(context), only_pins(context)) {
                    (false, _) => Ok(None),
                    (true, true) => {
                        let roots = Live::new(Roots::new([]).map_err(super::tls::reject)?);
                        let check = rules(translator, roots, context).map_err(in_context)?;
                        Ok(Some(PeerCheck { only_pins: true, ..check }))
                    }
                    (true, false) => Err(in_context(Reject::new(
                        "rules other than fingerprints need trusted_ca: without it nothing can be verified",
                    ))),
                };
            }
            // `rules` translates the revocation list, because its file may be watched.
            let roots = Live::new(roots(context).map_err(in_context)?);
            rules(translator, roots, context).map_err(in_context)?
        }
        Some(ValidationContextType::ValidationContextSdsSecretConfig(config)) => {
            let name = secret(config).at("validation_context_sds_secret_config")?;
            PeerCheck::new(translator.tls.roots(&name))
        }
        Some(ValidationContextType::CombinedValidationContext(combined)) => {
            let path = "combined_validation_context";
            let config = combined.validation_context_sds_secret_config.as_ref();
            let config = config.ok_or_else(|| Reject::new("needs a secret").at_field(path))?;
            let name = secret(config).at("validation_context_sds_secret_config").at(path)?;
            let roots = translator.tls.roots(&name);
            let context = combined.default_validation_context.as_ref();
            let rules = context.map_or(Ok(PeerCheck::new(Arc::clone(&roots))), |context| {
                if context.trusted_ca.is_some() || context.custom_validator_config.is_some() {
                    return Err(Reject::new(
                        "trusted_ca and custom_validator_config must come from the secret",
                    ));
                }
                rules(translator, roots, context)
            });
            rules.at("default_validation_context").at(path)?
        }
        Some(_) => return Err(Reject::new("certificate providers are not supported")),
    };
    Ok(Some(check))
}

/// Returns whether the context has rules other than trust anchors.
fn has_rules(context: &CertificateValidationContext) -> bool {
    let rest = CertificateValidationContext {
        trusted_ca: None,
        custom_validator_config: None,
        watched_directory: None,
        suppress_client_ca_list: false,
        ..context.clone()
    };
    rest != CertificateValidationContext::default()
}

/// Returns whether fingerprints are the only rules of the context.
fn only_pins(context: &CertificateValidationContext) -> bool {
    let rest = CertificateValidationContext {
        verify_certificate_hash: Vec::new(),
        verify_certificate_spki: Vec::new(),
        ..context.clone()
    };
    !has_rules(&rest)
}

/// Translates the rules of a TLS context.
fn rules(
    translator: Translator<'_>,
    roots: Arc<Live<Roots>>,
    context: &CertificateValidationContext,
) -> Result<PeerCheck> {
    let mut pins = Vec::new();
    for (index, hash) in context.verify_certificate_hash.iter().enumerate() {
        let wrong = || Reject::new("must be a SHA-256 in hexadecimal digits");
        let pin = Pin::certificate(hash).ok_or_else(wrong);
        pins.push(pin.at(format_args!("verify_certificate_hash[{index}]"))?);
    }
    for (index, hash) in context.verify_certificate_spki.iter().enumerate() {
        let wrong = || Reject::new("must be a SHA-256 in base64");
        pins.push(Pin::key(hash).ok_or_else(wrong).at(format_args!("verify_certificate_spki[{index}]"))?);
    }
    Ok(PeerCheck {
        crls: crls(translator, context).at("crl")?,
        only_leaf_crl: context.only_verify_leaf_cert_crl,
        max_depth: number(context.max_verify_depth),
        names: names(context)?,
        pins,
        accepts_untrusted: context.trust_chain_verification() == TrustChainVerification::AcceptUntrusted,
        ..PeerCheck::new(roots)
    })
}

/// Translates the revocation lists of a TLS context; a list in a file is watched.
fn crls(
    translator: Translator<'_>,
    context: &CertificateValidationContext,
) -> Result<Option<Arc<Live<Crls>>>> {
    let Some(source) = &context.crl else { return Ok(None) };
    let crls = read_crls(source)?;
    let Some(Specifier::Filename(path)) = &source.specifier else { return Ok(Some(Live::new(crls))) };
    let watched = context.watched_directory.as_ref().map(|folder| folder.path.as_str().into());
    let source = SecretSource::CrlFile { path: path.as_str().into(), watched };
    let live = translator.tls.crls(&SecretName { source, name: path.as_str().into() });
    live.set(Arc::new(crls));
    Ok(Some(live))
}

/// Reads one or more revocation lists.
pub(super) fn read_crls(source: &DataSource) -> Result<Crls> {
    Crls::from_pem(&read(source)?).map_err(|error| Reject::new(error.to_string()))
}

/// Translates the validation context of a secret.
pub(super) fn secret_roots(context: &CertificateValidationContext) -> Result<Roots> {
    let rest = CertificateValidationContext { crl: None, ..context.clone() };
    if has_rules(&rest) {
        return Err(Reject::new(
            "a secret supports only trusted_ca, custom_validator_config and crl: move all else to the TLS context",
        ));
    }
    let roots = roots(context)?;
    match &context.crl {
        None => Ok(roots),
        Some(source) => Ok(roots.with_crls(&read_crls(source).at("crl")?)),
    }
}

/// Translates the trust anchors of a validation context.
fn roots(context: &CertificateValidationContext) -> Result<Roots> {
    let refused = |error: skysail_identity::Error| Reject::new(error.to_string());
    let Some(custom) = &context.custom_validator_config else {
        let Some(source) = &context.trusted_ca else {
            return Err(Reject::new("must be given").at_field("trusted_ca"));
        };
        let pem = read(source).at("trusted_ca")?;
        return Roots::from_pem(&pem).map_err(refused).at("trusted_ca");
    };
    if context.crl.is_some() {
        return Err(Reject::new("must be in the trust bundles beside a custom validator").at_field("crl"));
    }
    let path = "custom_validator_config.typed_config";
    let any = custom.typed_config.as_ref().ok_or_else(|| Reject::new("must be given").at_field(path))?;
    let spiffe: SpiffeCertValidatorConfig = unpack(any).at(path)?;
    if spiffe.trust_domains.is_empty() {
        return Err(Reject::new("must be given").at_field("trust_domains").at_field(path));
    }
    let mut bundles = Vec::new();
    for (index, domain) in spiffe.trust_domains.iter().enumerate() {
        let at = |reject: Reject| reject.at_field(format_args!("trust_domains[{index}]")).at_field(path);
        let missing = |field| at(Reject::new("must be given").at_field(field));
        if domain.name.is_empty() {
            return Err(missing("name"));
        }
        let source = domain.trust_bundle.as_ref().ok_or_else(|| missing("trust_bundle"))?;
        let pem = read(source).at("trust_bundle").map_err(at)?;
        bundles.push((&*domain.name, pem));
    }
    let bundles = bundles.iter().map(|(name, pem)| (*name, &**pem));
    Roots::of_domains(bundles).map_err(refused).at(path)
}

/// Translates the accepted names of peer certificates.
#[expect(deprecated, reason = "Istio sends the older form")]
fn names(context: &CertificateValidationContext) -> Result<Vec<NameMatch>> {
    let mut names = Vec::new();
    for (index, matcher) in context.match_typed_subject_alt_names.iter().enumerate() {
        names.push(typed_name(matcher).at(format_args!("match_typed_subject_alt_names[{index}]"))?);
    }
    // As in Envoy, the newer field overrides the older one.
    if names.is_empty() {
        for (index, matcher) in context.match_subject_alt_names.iter().enumerate() {
            names.push(name(SanKind::Any, matcher).at(format_args!("match_subject_alt_names[{index}]"))?);
        }
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
    let some = |text: &String| match text.as_str() {
        "" => Err(Reject::new("an empty string would match every name")),
        text => Ok(text.to_owned()),
    };
    let pattern = match &matcher.match_pattern {
        Some(MatchPattern::Exact(text)) => Pattern::Exact(text.clone()),
        Some(MatchPattern::Prefix(text)) => Pattern::Prefix(some(text).at("prefix")?),
        Some(MatchPattern::Suffix(text)) => Pattern::Suffix(some(text).at("suffix")?),
        Some(MatchPattern::Contains(text)) => Pattern::Contains(some(text).at("contains")?),
        Some(MatchPattern::SafeRegex(pattern)) => {
            Pattern::Regex(super::text::anchored(&pattern.regex).at("safe_regex")?)
        }
        _ => return Err(Reject::new("must be exact, prefix, suffix, contains or safe_regex")),
    };
    Ok(NameMatch { kind, pattern, ignore_case: matcher.ignore_case })
}
