//! Secret, reduced to the keys that TLS of gateways needs. Other keys are never kept.

use std::{collections::BTreeMap, fmt};

use base64::{Engine as _, prelude::BASE64_STANDARD};

use super::manifest::SecretManifest;

/// Keys that are kept: certificate chain, private key, roots and revocation list, as cert-manager and as Istio name
/// them.
const KEYS: [&str; 8] = ["tls.crt", "tls.key", "ca.crt", "ca.crl", "cert", "key", "cacert", "crl"];
/// Type of a Secret that must have a certificate and its key.
const TLS_TYPE: &str = "kubernetes.io/tls";

/// Content of a Secret that concerns TLS.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret {
    /// Values by key.
    values: BTreeMap<&'static str, Vec<u8>>,
    /// Whether the type demands a certificate and its key.
    pub(crate) is_tls: bool,
}

/// Certificate chain and private key, PEM.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyPair<'a> {
    /// Certificate chain.
    pub chain: &'a [u8],
    /// Private key.
    pub key: &'a [u8],
}

fn is_pem(bytes: &[u8]) -> bool {
    bytes.windows(11).any(|part| part == b"-----BEGIN ")
}

impl KeyPair<'_> {
    /// Returns whether both are texts in PEM form.
    pub(crate) fn is_pem(&self) -> bool {
        is_pem(self.chain) && is_pem(self.key)
    }

    /// Returns whether the certificate is a text in PEM form.
    pub(crate) fn has_certificate(&self) -> bool {
        is_pem(self.chain)
    }
}

impl Secret {
    /// Takes the keys for TLS from a Secret. Also returns the names of keys whose values are not base64.
    pub(crate) fn read(manifest: SecretManifest) -> (Self, Vec<String>) {
        let mut secret = Self { values: BTreeMap::new(), is_tls: manifest.r#type == TLS_TYPE };
        let mut invalid = Vec::new();
        let (data, plain) = (manifest.data.unwrap_or_default(), manifest.string_data.unwrap_or_default());
        for (name, text) in data {
            let text: String = text.chars().filter(|c| !matches!(c, '\n' | '\r')).collect();
            match (BASE64_STANDARD.decode(text), kept(&name)) {
                (Err(_), _) => invalid.push(name),
                (Ok(value), Some(name)) => _ = secret.values.insert(name, value),
                (Ok(_), None) => {}
            }
        }
        // As in Kubernetes, `stringData` overrides `data`.
        for (name, text) in plain {
            if let Some(name) = kept(&name) {
                secret.values.insert(name, text.into_bytes());
            }
        }
        (secret, invalid)
    }

    /// Returns a Secret with these keys and values. Keys that are not for TLS are left out.
    pub fn with_values(values: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let kept = |(name, value): (String, Vec<u8>)| Some((kept(&name)?, value));
        Self { values: values.into_iter().filter_map(kept).collect(), is_tls: false }
    }

    /// Returns whether the Secret has nothing for TLS.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns certificate and key.
    pub fn pair(&self) -> Option<KeyPair<'_>> {
        let of = |chain, key| Some(KeyPair { chain: self.value(chain)?, key: self.value(key)? });
        of("cert", "key").or_else(|| of("tls.crt", "tls.key"))
    }

    /// Returns the roots that verify clients, PEM.
    pub fn roots(&self) -> Option<&[u8]> {
        self.value("cacert").or_else(|| self.value("ca.crt"))
    }

    /// Returns the revocation list, PEM.
    pub fn revocations(&self) -> Option<&[u8]> {
        self.value("crl").or_else(|| self.value("ca.crl"))
    }

    fn value(&self, name: &str) -> Option<&[u8]> {
        self.values.get(name).map(Vec::as_slice).filter(|value| !value.is_empty())
    }
}

fn kept(name: &str) -> Option<&'static str> {
    KEYS.into_iter().find(|known| *known == name)
}

/// Shows the names of the keys only.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.values.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_for_tls_are_kept_and_values_are_not_shown() {
        let manifest = SecretManifest {
            data: Some(
                [("tls.key".into(), "c2Vj\ncmV0".into()), ("password".into(), "cGFzcw==".into())].into(),
            ),
            string_data: Some([("tls.crt".into(), "chain".into()), ("token".into(), "t".into())].into()),
            ..SecretManifest::default()
        };
        let (secret, invalid) = Secret::read(manifest);
        assert_eq!(invalid, [""; 0]);
        assert_eq!(format!("{secret:?}"), r#"{"tls.crt", "tls.key"}"#);
        let pair = secret.pair().unwrap();
        assert_eq!((pair.chain, pair.key), (&b"chain"[..], &b"secret"[..]));
    }

    #[test]
    fn values_that_are_not_base64_are_named() {
        let data = Some([("tls.crt".into(), "%".into()), ("other".into(), "§".into())].into());
        let (_, invalid) = Secret::read(SecretManifest { data, ..SecretManifest::default() });
        assert_eq!(invalid, ["other", "tls.crt"]);
    }
}
