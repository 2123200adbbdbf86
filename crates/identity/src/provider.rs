//! The cryptography that all TLS configurations and checks of certificates use.

use std::sync::{Arc, LazyLock};

use rustls::{
    CipherSuite,
    crypto::{CryptoProvider, aws_lc_rs},
};

/// Returns the provider. AES-128 and SHA-256 come first: they cost least, and nothing in a handshake with X25519 or P-256 is
/// stronger.
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
