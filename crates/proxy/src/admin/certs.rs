//! `/certs`: certificates and trusted roots in use, in the shape of `envoy.admin.v3.Certificates`.

use std::{sync::Arc, time::SystemTime};

use axum::{Json, extract::State};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use skysail_identity::Description;

use super::Admin;
use skysail_policy::format;

/// `path` of certificates that are inline in the configuration.
const INLINE: &str = "<inline>";

/// Returns one entry for each secret, and for each certificate and each list of roots that is inline. `path` is the name
/// of the secret, or `<inline>`.
pub(super) async fn page(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let tls = admin.configuration.tls();
    let described = |name: &str, certificates: &[CertificateDer<'_>]| -> Value {
        certificates.iter().filter_map(|certificate| describe(name, certificate)).collect()
    };
    let named = tls.identities().into_iter().filter_map(|(name, identity)| Some((name.name, identity?)));
    let unnamed = tls.unnamed_identities().into_iter().map(|identity| (INLINE.into(), identity));
    let chains = named
        .chain(unnamed)
        .map(|(name, identity)| json!({"ca_cert": [], "cert_chain": described(&name, identity.chain())}));
    let roots = tls.all_roots().into_iter().filter_map(|(name, roots)| Some((name.name, roots?)));
    let unnamed = tls.unnamed_roots().into_iter().map(|roots| (INLINE.into(), roots));
    let roots = roots
        .chain(unnamed)
        .map(|(name, roots)| json!({"ca_cert": described(&name, roots.certificates()), "cert_chain": []}));
    Json(json!({"certificates": chains.chain(roots).collect::<Vec<_>>()}))
}

fn describe(path: &str, certificate: &CertificateDer<'_>) -> Option<Value> {
    let Description { serial, peer, not_before, not_after } = Description::from_der(certificate).ok()?;
    let left = not_after.duration_since(SystemTime::now()).unwrap_or_default();
    let uris = peer.uris.iter().map(|uri| json!({"uri": uri}));
    let dns = peer.dns.iter().map(|dns| json!({"dns": dns}));
    let ips = peer.ips.iter().map(|ip| json!({"ip_address": ip}));
    Some(json!({
        "path": path,
        "serial_number": serial,
        "subject_alt_names": uris.chain(dns).chain(ips).collect::<Vec<_>>(),
        "days_until_expiration": (left.as_secs() / 86_400).to_string(),
        "valid_from": rfc3339(not_before),
        "expiration_time": rfc3339(not_after),
    }))
}

/// Formats a time as RFC 3339, to the second.
fn rfc3339(time: SystemTime) -> String {
    let mut text = Vec::new();
    format::write_time(time, &mut text);
    String::from_utf8_lossy(&text).into_owned()
}
