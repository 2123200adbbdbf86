//! Validation of Gateway.

use super::{Code, Finding, Findings, host, is_label_text, port, secret_name};
use crate::api::{
    Gateway, Protocol,
    gateway::{Server, ServerTls, ServerTlsMode, TlsVersion},
};

/// Cipher suites that Istio accepts.
const CIPHERS: &[&str] = &[
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-CHACHA20-POLY1305",
    "ECDHE-ECDSA-AES128-SHA",
    "ECDHE-RSA-AES128-SHA",
    "ECDHE-ECDSA-AES256-SHA",
    "ECDHE-RSA-AES256-SHA",
    "AES128-GCM-SHA256",
    "AES256-GCM-SHA384",
    "AES128-SHA",
    "AES256-SHA",
    "DES-CBC3-SHA",
];

/// Returns the known cipher suites of a list, each once.
pub(crate) fn known_ciphers(list: &[String]) -> Vec<String> {
    let mut known: Vec<String> = Vec::new();
    for name in list.iter().filter(|name| CIPHERS.contains(&name.as_str())) {
        if !known.contains(name) {
            known.push(name.clone());
        }
    }
    known
}

/// Checks a Gateway.
pub(crate) fn gateway(spec: &Gateway) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.servers.is_empty() {
        findings.add(Code::MissingField, "spec.servers", "is missing", "add at least one server");
    }
    for (index, server) in spec.servers.iter().enumerate() {
        let field = format!("spec.servers[{index}]");
        check_port(server, &field, &mut findings);
        let name = |server: &Server| server.port.as_ref().map(|port| port.name.clone()).unwrap_or_default();
        let (own, before) = (name(server), &spec.servers[..index]);
        if !own.is_empty() && before.iter().any(|other| name(other) == own) {
            let remedy = "use a different name for each server";
            findings.add(
                Code::DuplicateName,
                format!("{field}.port.name"),
                format!("{own:?} is defined twice"),
                remedy,
            );
        }
        check_hosts(server, &field, &mut findings);
        if !server.bind.is_empty() && server.bind.parse::<std::net::IpAddr>().is_err() {
            let message = format!("{:?} is not an IP address", server.bind);
            findings.add(
                Code::InvalidAddress,
                format!("{field}.bind"),
                message,
                "write an IP address, or remove bind",
            );
        }
        if !server.default_endpoint.is_empty() {
            let message = "has no effect, as in Istio";
            findings.add(Code::NoEffect, format!("{field}.defaultEndpoint"), message, "use a VirtualService");
        }
        check_tls(server, &field, &mut findings);
        check_conflicts(server, before, &field, &mut findings);
    }
    findings.done()
}

fn check_port(server: &Server, field: &str, findings: &mut Findings) {
    let Some(of) = &server.port else {
        return findings.add(
            Code::MissingField,
            format!("{field}.port"),
            "is missing",
            "add number, name and protocol",
        );
    };
    port(of.number, &format!("{field}.port.number"), findings);
    if of.name.is_empty() {
        findings.add(
            Code::MissingField,
            format!("{field}.port.name"),
            "is missing",
            "add a name such as https",
        );
    }
    if of.target_port != 0 {
        let message = "has no effect, as in Istio";
        findings.add(
            Code::NoEffect,
            format!("{field}.port.targetPort"),
            message,
            "set targetPort in the gateway's Service",
        );
    }
    if Protocol::parse(&of.protocol).is_none_or(|protocol| protocol == Protocol::Udp) {
        let message = format!("{:?} is not a protocol of gateways", of.protocol);
        let remedy = "use HTTP, HTTPS, HTTP2, GRPC, GRPC-WEB, MONGO, TCP or TLS";
        findings.add(Code::UnknownProtocol, format!("{field}.port.protocol"), message, remedy);
    }
}

fn check_hosts(server: &Server, field: &str, findings: &mut Findings) {
    if server.hosts.is_empty() {
        findings.add(
            Code::MissingField,
            format!("{field}.hosts"),
            "is missing",
            "add at least one host, or \"*\"",
        );
    }
    for (index, name) in server.hosts.iter().enumerate() {
        let field = format!("{field}.hosts[{index}]");
        let (namespace, bare) = name.split_once('/').unwrap_or(("*", name));
        if bare.contains('/') || !(matches!(namespace, "*" | ".") || is_label_text(namespace, false)) {
            let message = format!("{name:?} is not of the form NAMESPACE/HOST");
            findings.add(
                Code::InvalidHost,
                field,
                message,
                "write a namespace, \".\" or \"*\" before the slash",
            );
        } else if !bare.is_empty() && !bare.contains('.') && bare != "*" {
            let message = format!("{bare:?} has no dot");
            findings.add(Code::InvalidHost, field, message, "write a full name, such as shop.example.com");
        } else {
            host(bare, &field, findings);
        }
    }
}

fn check_tls(server: &Server, field: &str, findings: &mut Findings) {
    let protocol = server.protocol();
    let speaks_tls = matches!(protocol, Some(Protocol::Https | Protocol::Tls));
    let field = format!("{field}.tls");
    let Some(tls) = &server.tls else {
        if speaks_tls {
            findings.add(
                Code::ServerWithoutTls,
                field,
                "is missing for protocol HTTPS or TLS",
                "add tls with a mode",
            );
        }
        return;
    };
    if !speaks_tls && protocol.is_some() {
        let is_http = protocol.is_some_and(Protocol::is_http);
        let only_redirects =
            is_http && *tls == ServerTls { https_redirect: tls.https_redirect, ..Default::default() };
        if !only_redirects {
            let remedy = if is_http {
                "use protocol HTTPS; plain HTTP allows httpsRedirect alone"
            } else {
                "use protocol TLS"
            };
            findings.add(Code::TlsOnPlainPort, field, "is not allowed for a protocol without TLS", remedy);
        }
        return;
    }
    if tls.https_redirect {
        let remedy = "set it in the server of the plain HTTP port";
        let message = "has no effect for a protocol with TLS";
        findings.add(Code::NoEffect, format!("{field}.httpsRedirect"), message, remedy);
    }
    check_credentials(tls, &field, findings);
    check_parameters(tls, &field, findings);
}

/// Checks that a mode has the certificates that it needs, and no others.
fn check_credentials(tls: &ServerTls, field: &str, findings: &mut Findings) {
    let files = [
        ("serverCertificate", &tls.server_certificate),
        ("privateKey", &tls.private_key),
        ("caCertificates", &tls.ca_certificates),
        ("credentialName", &tls.credential_name),
        ("caCertCredentialName", &tls.ca_cert_credential_name),
    ];
    if tls.mode.is_passthrough() || tls.mode == ServerTlsMode::IstioMutual {
        for (name, value) in files.iter().filter(|(_, value)| !value.is_empty()) {
            let message = format!("{value:?} has no effect in this mode");
            let (field, remedy) = (format!("{field}.{name}"), "remove it, or use mode SIMPLE or MUTUAL");
            if tls.mode == ServerTlsMode::IstioMutual {
                findings.add(Code::FieldNotAllowed, field, message, remedy);
            } else {
                findings.add(Code::NoEffect, field, message, remedy);
            }
        }
        return;
    }
    let names = tls.credentials();
    let secrets = names.iter().map(|name| ("credentialName", *name));
    let roots = [("caCertCredentialName", tls.ca_cert_credential_name.as_str())];
    // Secrets of the proxy's own namespace only: a Gateway of any namespace may select the proxy.
    for (which, name) in secrets.chain(roots) {
        secret_name(name, &format!("{field}.{which}"), findings);
    }
    if !names.is_empty() || tls.has_mesh_certificate() {
        return;
    }
    if !tls.tls_certificates.is_empty() {
        for (index, pair) in tls.tls_certificates.iter().enumerate() {
            if pair.server_certificate.is_empty() || pair.private_key.is_empty() {
                let field = format!("{field}.tlsCertificates[{index}]");
                findings.add(Code::MissingField, field, "needs serverCertificate and privateKey", "set both");
            }
            // One list of roots verifies the clients of a server.
            if !pair.ca_certificates.is_empty() && pair.ca_certificates != tls.root_file() {
                let field = format!("{field}.tlsCertificates[{index}].caCertificates");
                let message = format!("has no effect, because {:?} verifies clients", tls.root_file());
                findings.add(Code::NoEffect, field, message, "put all roots into one file");
            }
        }
    } else {
        for (name, value) in &files[..2] {
            if value.is_empty() {
                let remedy = "set credentialName to the name of a Secret, or set this file";
                findings.add(Code::MissingField, format!("{field}.{name}"), "is missing", remedy);
            }
        }
    }
    let verifies = matches!(tls.mode, ServerTlsMode::Mutual | ServerTlsMode::OptionalMutual);
    if verifies && tls.root_file().is_empty() && tls.ca_cert_credential_name.is_empty() {
        let remedy = "set the file of the roots that verify clients";
        findings.add(Code::MissingField, format!("{field}.caCertificates"), "is missing", remedy);
    }
}

/// Checks a list of cipher suites.
pub(super) fn ciphers(list: &[String], field: &str, findings: &mut Findings) {
    for (index, name) in list.iter().enumerate() {
        let field = format!("{field}[{index}]");
        if !CIPHERS.contains(&name.as_str()) {
            let message = format!("{name:?} is not a known cipher suite and is left out");
            findings.add(
                Code::UnknownCipher,
                field,
                message,
                "use a name of OpenSSL, such as ECDHE-RSA-AES128-GCM-SHA256",
            );
        } else if list[..index].contains(name) {
            findings.add(Code::UnknownCipher, field, "is listed twice", "remove one of them");
        }
    }
}

fn check_parameters(tls: &ServerTls, field: &str, findings: &mut Findings) {
    let (min, max) = (tls.min_protocol_version, tls.max_protocol_version);
    if max != TlsVersion::Auto && min > max {
        let message = "is above maxProtocolVersion";
        findings.add(Code::TlsVersions, format!("{field}.minProtocolVersion"), message, "lower it");
    }
    ciphers(&tls.cipher_suites, &format!("{field}.cipherSuites"), findings);
    let hexadecimal = |hash: &String| {
        let digits = hash.chars().filter(|c| *c != ':');
        digits.clone().count() == 64 && digits.clone().all(|c| c.is_ascii_hexdigit())
    };
    for (index, hash) in tls.verify_certificate_hash.iter().enumerate() {
        if !hexadecimal(hash) {
            let message = format!("{hash:?} is not a SHA-256 hash in hexadecimal");
            let field = format!("{field}.verifyCertificateHash[{index}]");
            findings.add(Code::InvalidValue, field, message, "write 64 hexadecimal digits");
        }
    }
    if tls.insecure_skip_verify == Some(true) && !tls.accepts_untrusted() {
        let (field, remedy) =
            (format!("{field}.insecureSkipVerify"), "remove it, or use mode MUTUAL or OPTIONAL_MUTUAL");
        findings.add(Code::NoEffect, field, "has no effect with this mode", remedy);
    }
    if !tls.ca_crl.is_empty() && !tls.has_list() {
        // Without the list, revoked certificates would be accepted.
        let message = "is supported together with roots of clients only";
        let remedy = "set mode MUTUAL with caCertificates or credentialName";
        findings.add(Code::Unsupported, format!("{field}.caCrl"), message, remedy);
    }
}

/// Reports servers of the same Gateway that Istio would skip.
fn check_conflicts(server: &Server, before: &[Server], field: &str, findings: &mut Findings) {
    let number = server.number();
    let same_port = || before.iter().filter(|other| other.number() == number && other.bind == server.bind);
    if number == 0 {
        return;
    }
    let plain = |server: &Server| server.terminating_or_forwarded_tls().is_none();
    let conflicting = same_port().any(|other| {
        plain(other) != plain(server) || plain(server) && !(other.is_plain_http() && server.is_plain_http())
    });
    if conflicting {
        let message =
            format!("port {number} is used by an earlier server that cannot share it; this one is skipped");
        findings.add(Code::ServerPortConflict, format!("{field}.port"), message, "use another port");
    }
    if plain(server) {
        return;
    }
    let bare = |host: &str| host.split_once('/').map_or(host, |(_, host)| host).to_owned();
    for (index, name) in server.hosts.iter().enumerate() {
        let tls = same_port().filter(|other| !plain(other));
        if tls.flat_map(|other| &other.hosts).any(|other| bare(other) == bare(name)) {
            let message = format!(
                "{:?} is served by an earlier server of the port; this server is skipped",
                bare(name)
            );
            findings.add(
                Code::ServerHostTwice,
                format!("{field}.hosts[{index}]"),
                message,
                "remove it from one of them",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(servers: &str) -> Vec<String> {
        let spec: Gateway = serde_json::from_str(&format!(r#"{{"servers": [{servers}]}}"#)).unwrap();
        let line = |finding: Finding| {
            let mark = if finding.is_error() { "error" } else { "warning" };
            let field = finding.field.trim_start_matches("spec.servers").to_owned();
            format!("{mark} {field}: {}", finding.message)
        };
        gateway(&spec).into_iter().map(line).collect()
    }

    #[test]
    fn a_gateway_without_errors_is_accepted() {
        let plain = r#"{"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": ["*", "ns/a.b", "./c.d", "*/*.e.f"], "tls": {"httpsRedirect": true}}"#;
        let tls = r#"{"port": {"number": 443, "name": "https", "protocol": "HTTPS"}, "hosts": ["a.b"], "tls": {"mode": "MUTUAL", "credentialName": "a.crt-1", "minProtocolVersion": "TLSV1_2"}}"#;
        assert_eq!(found(&format!("{plain}, {tls}")), [""; 0]);
    }

    #[test]
    fn all_errors_are_reported_at_once() {
        let one = r#"{"port": {"number": 0, "protocol": "UDP"}, "hosts": ["short", "a/b/c.d", "http://a.b"], "bind": "any"}"#;
        assert_eq!(found(one).len(), 7, "{:#?}", found(one));
        assert_eq!(found(""), ["error : is missing"]);
    }

    #[test]
    fn tls_needs_its_credentials_and_protocol() {
        let of = |protocol: &str, tls: &str| {
            found(&format!(
                r#"{{"port": {{"number": 1, "name": "a", "protocol": "{protocol}"}}, "hosts": ["a.b"], "tls": {tls}}}"#
            ))
        };
        let same = |found: Vec<String>, expected: &[&str]| assert_eq!(found, expected);
        same(
            of("HTTPS", r#"{"mode": "SIMPLE"}"#),
            &["error [0].tls.serverCertificate: is missing", "error [0].tls.privateKey: is missing"],
        );
        assert_eq!(of("HTTPS", r#"{"mode": "MUTUAL"}"#).len(), 3);
        same(of("HTTPS", "null"), &["error [0].tls: is missing for protocol HTTPS or TLS"]);
        same(
            of("HTTP", r#"{"mode": "SIMPLE", "credentialName": "a"}"#),
            &["error [0].tls: is not allowed for a protocol without TLS"],
        );
        same(
            of("HTTPS", r#"{"mode": "SIMPLE", "credentialName": "a", "httpsRedirect": true}"#),
            &["warning [0].tls.httpsRedirect: has no effect for a protocol with TLS"],
        );
        same(
            of("TLS", r#"{"mode": "ISTIO_MUTUAL", "credentialName": "a"}"#),
            &["error [0].tls.credentialName: \"a\" has no effect in this mode"],
        );
        same(
            of("TLS", r#"{"mode": "SIMPLE", "credentialName": "other/a"}"#),
            &["error [0].tls.credentialName: \"other/a\" is not the name of a Secret"],
        );
        let pairs = r#"{"mode": "MUTUAL", "tlsCertificates": [
            {"serverCertificate": "/a", "privateKey": "/b", "caCertificates": "/r"},
            {"serverCertificate": "/c", "privateKey": "/d", "caCertificates": "/s"}]}"#;
        same(
            of("TLS", pairs),
            &[
                "warning [0].tls.tlsCertificates[1].caCertificates: has no effect, because \"/r\" verifies clients",
            ],
        );
        let versions = r#"{"mode": "SIMPLE", "credentialName": "a", "minProtocolVersion": "TLSV1_3", "maxProtocolVersion": "TLSV1_2"}"#;
        same(of("TLS", versions), &["error [0].tls.minProtocolVersion: is above maxProtocolVersion"]);
    }

    #[test]
    fn servers_that_are_skipped_are_reported() {
        let server = |name: &str, protocol: &str, host: &str, tls: &str| {
            format!(
                r#"{{"port": {{"number": 443, "name": "{name}", "protocol": "{protocol}"}}, "hosts": ["{host}"], "tls": {tls}}}"#
            )
        };
        let pass = r#"{"mode": "PASSTHROUGH"}"#;
        let two = [server("a", "TLS", "a.b", pass), server("b", "TLS", "./a.b", pass)].join(",");
        assert_eq!(
            found(&two),
            [
                "warning [1].hosts[0]: \"a.b\" is served by an earlier server of the port; this server is skipped"
            ]
        );
        let two = [server("a", "TLS", "a.b", pass), server("a", "HTTP", "a.b", "null")].join(",");
        assert_eq!(found(&two).len(), 2, "{:#?}", found(&two));
    }
}
