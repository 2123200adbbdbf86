//! Creation of certificate signing requests with new keys (PKCS #10, RFC 2986).

use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use skysail_core::SpiffeId;

use crate::{Error, identity::Identity};

/// A new ECDSA P-256 key and the signing request for its public key.
#[derive(Debug)]
pub struct KeyAndCsr {
    key: KeyPair,
    /// The request, PEM.
    pub csr_pem: String,
}

impl KeyAndCsr {
    /// Generates a key and a request that names `id`, as Istio's agents do. The authority determines the name in
    /// the certificate from the authenticated caller.
    ///
    /// # Errors
    /// No key can be generated, or the ID cannot be encoded in a request.
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

    /// Combines the key with the signed chain, leaf first.
    ///
    /// # Errors
    /// The chain cannot be parsed, or belongs to another key.
    pub fn finish(&self, chain_pem: &[u8]) -> Result<Identity, Error> {
        Identity::from_pem(chain_pem, self.key.serialize_pem().as_bytes())
    }

    /// Returns the private key, PKCS #8 in PEM.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }
}
