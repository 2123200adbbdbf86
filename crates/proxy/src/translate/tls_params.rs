//! Translates TLS versions, cipher suites and groups from BoringSSL's names.
//!
//! The result is never weaker than the configuration. Names that rustls does not support (CBC, RSA key
//! exchange, P-521) are skipped if others of the list remain. Istio always sends two such cipher suites.

use rustls::{CipherSuite, NamedGroup};
use skysail_identity::{TlsSpec, tls::Version};
use skysail_xds::envoy::pb::envoy::extensions::transport_sockets::tls::v3::{
    TlsParameters, tls_parameters::TlsProtocol,
};

use super::{At as _, Reject, Result, Translator, warn_once};

/// TLS 1.2 cipher suites: both names, and the suite if rustls supports it.
const SUITES: &[(&str, &str, Option<CipherSuite>)] = {
    use CipherSuite as S;
    &[
        (
            "ECDHE-ECDSA-AES128-GCM-SHA256",
            "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
            Some(S::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256),
        ),
        (
            "ECDHE-RSA-AES128-GCM-SHA256",
            "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
            Some(S::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256),
        ),
        (
            "ECDHE-ECDSA-AES256-GCM-SHA384",
            "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
            Some(S::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384),
        ),
        (
            "ECDHE-RSA-AES256-GCM-SHA384",
            "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
            Some(S::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384),
        ),
        (
            "ECDHE-ECDSA-CHACHA20-POLY1305",
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
            Some(S::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256),
        ),
        (
            "ECDHE-RSA-CHACHA20-POLY1305",
            "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
            Some(S::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256),
        ),
        ("ECDHE-ECDSA-AES128-SHA", "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA", None),
        ("ECDHE-ECDSA-AES256-SHA", "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA", None),
        ("ECDHE-RSA-AES128-SHA", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", None),
        ("ECDHE-RSA-AES128-SHA256", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256", None),
        ("ECDHE-RSA-AES256-SHA", "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA", None),
        ("AES128-GCM-SHA256", "TLS_RSA_WITH_AES_128_GCM_SHA256", None),
        ("AES256-GCM-SHA384", "TLS_RSA_WITH_AES_256_GCM_SHA384", None),
        ("AES128-SHA", "TLS_RSA_WITH_AES_128_CBC_SHA", None),
        ("AES256-SHA", "TLS_RSA_WITH_AES_256_CBC_SHA", None),
        ("DES-CBC3-SHA", "TLS_RSA_WITH_3DES_EDE_CBC_SHA", None),
    ]
};

/// Groups, in the same form.
const GROUPS: &[(&str, &str, Option<NamedGroup>)] = &[
    ("X25519", "x25519", Some(NamedGroup::X25519)),
    ("P-256", "prime256v1", Some(NamedGroup::secp256r1)),
    ("P-384", "secp384r1", Some(NamedGroup::secp384r1)),
    ("X25519MLKEM768", "X25519MLKEM768", Some(NamedGroup::X25519MLKEM768)),
    ("MLKEM1024", "MLKEM1024", Some(NamedGroup::MLKEM1024)),
    ("P-521", "secp521r1", None),
    ("P-224", "secp224r1", None),
];

/// Applies the TLS parameters of a context.
pub(super) fn apply(translator: Translator<'_>, proto: &TlsParameters, spec: &mut TlsSpec) -> Result<()> {
    spec.min_version = match proto.tls_minimum_protocol_version() {
        TlsProtocol::TlsAuto | TlsProtocol::TlSv12 => Version::Tls12,
        TlsProtocol::TlSv13 => Version::Tls13,
        old @ (TlsProtocol::TlSv10 | TlsProtocol::TlSv11) => {
            let reason = format!("{} is not supported: peers need TLS 1.2", old.as_str_name());
            if translator.strict {
                return Err(Reject::new(reason).at_field("tls_minimum_protocol_version"));
            }
            warn_once(format!("tls_minimum_protocol_version: {reason}"));
            Version::Tls12
        }
    };
    spec.max_version = match proto.tls_maximum_protocol_version() {
        TlsProtocol::TlsAuto => None,
        TlsProtocol::TlSv12 => Some(Version::Tls12),
        TlsProtocol::TlSv13 => Some(Version::Tls13),
        old @ (TlsProtocol::TlSv10 | TlsProtocol::TlSv11) => {
            let reason = format!("{} is not supported: must be TLSv1_2 or TLSv1_3", old.as_str_name());
            return Err(Reject::new(reason).at_field("tls_maximum_protocol_version"));
        }
    };
    spec.suites = spoken(&proto.cipher_suites, SUITES, "cipher suite").at("cipher_suites")?;
    spec.groups = spoken(&proto.ecdh_curves, GROUPS, "group").at("ecdh_curves")?;
    Ok(())
}

/// Returns the supported items of a list. An item may be a list itself, `A:B`, or groups of equal preference,
/// `[A|B]`, which keep their order here.
fn spoken<T: Copy + PartialEq>(
    list: &[String],
    known: &[(&str, &str, Option<T>)],
    what: &str,
) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for item in list.iter().flat_map(|item| item.split(':')) {
        let inner = item.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        for name in inner.unwrap_or(item).split('|') {
            let found = known.iter().find(|(short, long, _)| name == *short || name == *long);
            let Some((.., spoken)) = found else {
                return Err(Reject::new(format!("{name:?} is not the name of a {what}")));
            };
            all.extend(spoken.filter(|one| !all.contains(one)));
        }
    }
    if all.is_empty() && !list.is_empty() {
        let names: Vec<_> = known.iter().filter(|known| known.2.is_some()).map(|known| known.0).collect();
        return Err(Reject::new(format!("no {what} of {list:?} is supported, only {}", names.join(", "))));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_boringssl() {
        let spoken = |list: &[&str]| {
            let list: Vec<_> = list.iter().map(ToString::to_string).collect();
            spoken(&list, SUITES, "cipher suite").map_err(|reject| reject.to_string())
        };
        let (rsa256, rsa128) = (
            CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
            CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        );
        let chacha = CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256;
        assert_eq!(spoken(&[]).unwrap(), []);
        assert_eq!(
            spoken(&["AES256-SHA", "ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-RSA-AES128-GCM-SHA256"]).unwrap(),
            [rsa256, rsa128]
        );
        let grouped =
            "[ECDHE-RSA-AES128-GCM-SHA256|ECDHE-RSA-CHACHA20-POLY1305]:TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384";
        assert_eq!(spoken(&[grouped]).unwrap(), [rsa128, chacha, rsa256]);
        for unknown in ["ALL", "-AES128-SHA", "TLS_AES_128_GCM_SHA256", "", "[ECDHE-RSA-AES128-GCM-SHA256"] {
            let refused = spoken(&["ECDHE-RSA-AES128-GCM-SHA256", unknown]).unwrap_err();
            assert!(refused.contains("not the name of a cipher suite"), "{unknown}: {refused}");
        }
        let refused = spoken(&["AES128-SHA"]).unwrap_err();
        assert!(refused.contains("is supported, only ECDHE-ECDSA-AES128-GCM-SHA256"), "{refused}");
    }
}
