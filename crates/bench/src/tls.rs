//! TLS settings of the clients, as in a mesh, and the same for every peer: TLS 1.3, AES-128-GCM, X25519, ECDSA P-256,
//! and a client certificate.

use std::sync::Arc;

use rustls::{
    ClientConfig, RootCertStore,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use skysail_load::stream::Tls;

use crate::certificates::Certificates;

/// Creates the settings of a client with these certificates and this protocol. With `resume`, later connections offer
/// the tickets of the server.
pub(crate) fn mesh(certificates: &Certificates, protocol: &[u8], resume: bool) -> anyhow::Result<Tls> {
    /// Maximum number of stored tickets. rustls stores at most 8 of them for one server name.
    const TICKETS: usize = 4_096;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&certificates.root)?)?;
    let own = &certificates.client;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(&own.certificate)?.collect();
    let provider = CryptoProvider {
        cipher_suites: vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256],
        kx_groups: vec![aws_lc_rs::kx_group::X25519],
        ..aws_lc_rs::default_provider()
    };
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain?, PrivateKeyDer::from_pem_file(&own.key)?)?;
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = if resume { Resumption::in_memory_sessions(TICKETS) } else { Resumption::disabled() };
    Ok(Tls::new(Arc::new(config), ServerName::try_from(certificates.server.dns.clone())?))
}
