//! DestinationRule: TLS with certificates and revocation lists in files.

use std::{fs, path::Path};

use rcgen::{
    Certificate, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DistinguishedName,
    DnType, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

use crate::{
    CLIENTS, get, mesh_with,
    pools_connections::address,
    secure::{secret, sha256},
    wait, wait_logged,
};

const RULES: &str = include_str!("pools_tls.yaml");
/// Serial number of the server's certificate.
const SERIAL: u64 = 4711;

pub(crate) type Issuer = CertifiedIssuer<'static, KeyPair>;

fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

pub(crate) fn issuer(name: &str) -> Issuer {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(name);
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns a certificate and its key in PEM.
pub(crate) fn member(issuer: &Issuer, name: &str, serial: u64) -> (Certificate, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name = named(&format!("member {name}"));
    params.serial_number = Some(SerialNumber::from(serial));
    (params.signed_by(&key, issuer).unwrap(), key.serialize_pem())
}

/// Returns a list of one revoked certificate.
pub(crate) fn revocations(issuer: &Issuer, serial: u64) -> String {
    let revoked = RevokedCertParams {
        serial_number: SerialNumber::from(serial),
        revocation_time: date_time_ymd(2020, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let list = CertificateRevocationListParams {
        this_update: date_time_ymd(2020, 1, 1),
        next_update: date_time_ymd(2100, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![revoked],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(issuer).unwrap().pem().unwrap()
}

/// Writes the files that the rules name. Returns the Secrets, and the hash of the certificate in Secret
/// `member`.
fn write_files(folder: &Path) -> (String, String) {
    let (root, other) = (issuer("root"), issuer("other"));
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    write("root.crt", &root.pem());
    write("other.crt", &other.pem());
    for (name, issuer) in [("member", &root), ("stranger", &other)] {
        let (chain, key) = member(issuer, name, 1);
        write(&format!("{name}.crt"), &chain.pem());
        write(&format!("{name}.key"), &key);
    }
    let pair = |name: &str, (chain, key): (Certificate, String)| {
        secret(name, &[("tls.crt", chain.pem()), ("tls.key", key), ("ca.crt", root.pem())])
    };
    let known = member(&root, "member", 2);
    let hash: String = sha256(known.0.der()).iter().map(|byte| format!("{byte:02x}")).collect();
    let of_members = pair("member", known) + &pair("stranger", member(&other, "stranger", 2));
    let lists = [("revoked", SERIAL), ("unrevoked", SERIAL + 1)];
    let lists = lists.map(|(name, serial)| (name, revocations(&root, serial)));
    lists.iter().for_each(|(name, list)| write(&format!("{name}.crl"), list));
    let of_lists = lists.map(|(name, list)| secret(name, &[("ca.crt", root.pem()), ("ca.crl", list)]));
    let edge = pair("edge", member(&root, "server.example", SERIAL));
    (edge + &of_members + &of_lists.concat(), hash)
}

fn entry(host: &str, address: &str, port: u16) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: {host}, namespace: shop}}\n\
         spec: {{hosts: [{host}.example.com], location: MESH_EXTERNAL, resolution: STATIC, \
         endpoints: [{{address: {address}}}], \
         ports: [{{number: 80, name: http, protocol: HTTP, targetPort: {port}}}]}}\n"
    )
}

#[test]
fn certificates_are_in_files() {
    const HOSTS: [(&str, u16, u16); 16] = [
        ("trusted", 8443, 298),
        ("distrusted", 8443, 503),
        ("unverified", 8443, 298),
        ("verified", 8443, 503),
        ("revoked", 8443, 503),
        ("unrevoked", 8443, 298),
        ("secret-revoked", 8443, 503),
        ("secret-unrevoked", 8443, 298),
        ("member", 8444, 298),
        ("stranger", 8444, 503),
        ("anonymous", 8444, 503),
        ("named", 8443, 298),
        ("misnamed", 8443, 503),
        ("secret", 8443, 298),
        ("secret-member", 8444, 298),
        ("secret-stranger", 8444, 503),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (secret, hash) = write_files(folder.path());
    let rules = RULES.replace("FOLDER", &folder.path().to_string_lossy());
    let mesh = mesh_with(&[rules, secret].concat(), &["shop/by-envoy"]).ready();
    let edge = address(&mesh, "edge");
    let entries: String = HOSTS.iter().map(|(host, port, _)| entry(host, &edge, *port)).collect();
    mesh.put("entries.yaml", &entries);
    for (host, _, status) in HOSTS {
        let texts: &[&str] = if status == 503 { &["upstream connect error"] } else { &[] };
        let clients = if host.ends_with("revoked") { &CLIENTS[..1] } else { &CLIENTS[..] };
        for client in clients {
            wait(&mesh, client, &get(&format!("http://{host}.example.com/"), status, texts));
        }
    }
    // The server behind the gateway sees the certificate of the Secret.
    let hash = format!("Hash={hash}");
    for client in CLIENTS {
        wait(&mesh, client, &get("http://secret-member.example.com/certificate", 200, &[&hash]));
    }
}

/// A host whose certificates come from a Secret that does not exist.
const WITHOUT_SECRET: &str = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: secretless, namespace: shop}
spec:
  workloadSelector: {matchLabels: {app: by-skysail}}
  host: secretless.example.com
  trafficPolicy: {tls: {mode: SIMPLE, credentialName: absent}}
";

#[test]
fn a_missing_secret_is_named() {
    let mesh = mesh_with(&[WITHOUT_SECRET, &entry("secretless", "192.0.2.1", 443)].concat(), &[]).ready();
    let text = "has not sent a secret that this host needs";
    wait(&mesh, "by-skysail", &get("http://secretless.example.com/", 503, &[text]));
    wait_logged(
        &mesh,
        &["by-skysail", "-c", "proxy"],
        &["DU", "secrets_missing{kubernetes://absent-cacert}"],
    );
}
