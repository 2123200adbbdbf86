//! Cryptography provider of all TLS configurations and certificate checks.

use std::sync::{Arc, LazyLock};

use rustls::{
    CipherSuite,
    crypto::{CryptoProvider, aws_lc_rs},
};

/// Returns the provider. AES-128 and SHA-256 come first: they are the cheapest, and X25519 or P-256 limits the
/// strength of the handshake anyway.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites.sort_by_key(|suite| {
            !matches!(
                suite.suite(),
                CipherSuite::TLS13_AES_128_GCM_SHA256
                    | CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                    | CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
            )
        });
        Arc::new(provider)
    });
    Arc::clone(&PROVIDER)
}
