//! Validation of roots in addition to those of the mesh's own authority.

use x509_parser::pem::Pem;

use super::{Code, Findings};
use crate::api::{ConfigMap, Labels, MeshConfig};

/// Key of the certificates in a ConfigMap. Source: Gateway API, BackendTLSPolicy.
const ROOTS_KEY: &str = "ca.crt";

/// Checks `caCertificates`. An entry with unsupported fields verifies no certificate.
pub(super) fn check(mesh: &MeshConfig, findings: &mut Findings) {
    let accepted: Vec<_> = mesh.trust_domains().collect();
    for (index, entry) in mesh.ca_certificates.iter().enumerate() {
        let at = |field: &str| format!("caCertificates[{index}].{field}");
        match (entry.pem.is_empty(), entry.spiffe_bundle_url.is_empty()) {
            (false, true) => {
                if let Err(problem) = check_pem(&entry.pem) {
                    findings.add(
                        Code::InvalidCertificate,
                        at("pem"),
                        problem,
                        "set the root certificates in PEM format",
                    );
                }
            }
            (true, false) => findings.add(
                Code::UnsupportedSetting,
                at("spiffeBundleUrl"),
                "SPIFFE bundles are not fetched, so this entry adds no root",
                "set pem to the certificates",
            ),
            (false, false) => {
                findings.add(
                    Code::ExclusiveFields,
                    at("spiffeBundleUrl"),
                    "is not allowed together with pem",
                    "remove one of them",
                );
            }
            (true, true) => {
                findings.add(
                    Code::MissingField,
                    at("pem"),
                    "is missing",
                    "set the root certificates in PEM format",
                );
            }
        }
        if !entry.cert_signers.is_empty() {
            findings.add(
                Code::UnsupportedSetting,
                at("certSigners"),
                "certificate signers are not supported, so this entry adds no root",
                "remove certSigners",
            );
        }
        for (place, domain) in entry.trust_domains.iter().enumerate() {
            let field = at(&format!("trustDomains[{place}]"));
            if domain.is_empty() || domain.contains('/') {
                let remedy = "write the name alone, such as cluster.local";
                findings.add(
                    Code::InvalidTrustDomain,
                    field,
                    format!("{domain:?} is not a trust domain"),
                    remedy,
                );
            } else if !accepted.contains(&domain) {
                let message = format!("peers of {domain:?} are not accepted, so its roots have no effect");
                findings.add(Code::UnknownTrustDomain, field, message, "add it to trustDomainAliases");
            }
        }
    }
}

/// Returns the content of a ConfigMap that has no settings: its root certificates, if the key contains nothing else.
pub(crate) fn root_map(data: &Labels) -> ConfigMap {
    match data.get(ROOTS_KEY) {
        Some(pem) if check_pem(pem).is_ok() => ConfigMap::Roots(pem.as_str().into()),
        _ => ConfigMap::Other,
    }
}

fn check_pem(text: &str) -> Result<(), String> {
    let mut count = 0;
    for block in Pem::iter_from_buffer(text.as_bytes()) {
        let block = block.map_err(|error| format!("is not PEM: {error}"))?;
        if block.label != "CERTIFICATE" {
            return Err(format!("contains a {}; only certificates are allowed", block.label));
        }
        block.parse_x509().map_err(|error| format!("certificate {count} cannot be parsed: {error}"))?;
        count += 1;
    }
    if count == 0 { Err("contains no certificate in PEM format".to_owned()) } else { Ok(()) }
}
