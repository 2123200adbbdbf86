//! Certificate of listeners with TLS, and clients that trust it.

use std::sync::{Arc, LazyLock};

use serde_json::{Value, json};

struct Secrets {
    certificate: String,
    key: String,
    client: Arc<rustls::ClientConfig>,
}

static SECRETS: LazyLock<Secrets> = LazyLock::new(|| {
    let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Secrets { certificate: made.cert.pem(), key: made.signing_key.serialize_pem(), client: Arc::new(client) }
});

/// Returns a transport socket with TLS for both versions of HTTP.
pub(crate) fn transport_socket() -> Value {
    json!({"name": "tls", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificates": [{
                "certificate_chain": {"inline_string": SECRETS.certificate},
                "private_key": {"inline_string": SECRETS.key},
            }],
        },
    }})
}

pub(crate) fn client() -> Arc<rustls::ClientConfig> {
    Arc::clone(&SECRETS.client)
}
