//! Asking for a certificate: a fresh key and a signing request for it (PKCS #10, RFC 2986).

use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use skysail_core::SpiffeId;

use crate::{Error, identity::Identity};

/// A fresh ECDSA P-256 key and the request to sign its public half.
#[derive(Debug)]
pub struct KeyAndCsr {
    key: KeyPair,
    /// The request in PEM.
    pub csr_pem: String,
}

impl KeyAndCsr {
    /// Makes a key and a request. The authority decides about names by who asks; `id` is a hint that Istio's
    /// own agents give.
    ///
    /// # Errors
    /// When the id cannot be written into a certificate.
    pub fn generate(id: Option<&SpiffeId>) -> Result<Self, Error> {
        let refused = |error: rcgen::Error| Error::Request(error.to_string());
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(refused)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if let Some(id) = id {
            params.subject_alt_names.push(SanType::URI(id.to_string().try_into().map_err(refused)?));
        }
        let csr_pem = params.serialize_request(&key).and_then(|csr| csr.pem()).map_err(refused)?;
        Ok(Self { key, csr_pem })
    }

    /// Puts the key together with the signed chain, leaf first.
    ///
    /// # Errors
    /// When the chain cannot be parsed or is another key's.
    pub fn finish(&self, chain_pem: &[u8]) -> Result<Identity, Error> {
        Identity::from_pem(chain_pem, self.key.serialize_pem().as_bytes())
    }

    /// The private key, PKCS #8 in PEM.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }
}
