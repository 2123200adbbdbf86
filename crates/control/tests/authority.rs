//! The certificate authority of a control plane process: plugged in, replaced, rotated over a restart; and the requests
//! that it refuses.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests may end the test")]

mod support;

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, PublicKeyData as _};
use serde_json::{Value, json};
use skysail_core::SpiffeId;
use skysail_identity::{
    Authority, BoundPod, Issuer as TokenIssuer, KeyAndCsr, Live, PeerCheck, Roots, ServiceAccount,
    check::Role,
};
use skysail_xds::{certificates::create_certificate, istio::IstioCertificateRequest};
use support::{Control, Folder, bearer, connect, endpoint};
use tonic::{Status, metadata::MetadataMap, transport::ClientTlsConfig};

/// Certificate and key of an authority.
struct TestAuthority {
    pem: String,
    key: String,
    issuer: Issuer<'static, KeyPair>,
}

fn authority(name: &str, above: Option<&TestAuthority>) -> TestAuthority {
    let pair = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let certificate = match above {
        Some(above) => params.signed_by(&pair, &above.issuer).unwrap(),
        None => params.self_signed(&pair).unwrap(),
    };
    let key = pair.serialize_pem();
    TestAuthority {
        pem: certificate.pem(),
        key,
        issuer: Issuer::from_ca_cert_der(certificate.der(), pair).unwrap(),
    }
}

/// Requests a certificate with a CSR and a token. Returns the chain.
async fn sign(control: &Control, folder: &Folder, csr: &str, token: &str) -> Result<Vec<String>, Status> {
    let request = IstioCertificateRequest { csr: csr.to_owned(), ..IstioCertificateRequest::default() };
    create_certificate(connect(control, folder).await, bearer(token), request).await
}

/// Requests a certificate and verifies it with `root`. Returns the chain.
async fn chain(control: &Control, folder: &Folder, root: &str) -> Vec<String> {
    let key = KeyAndCsr::generate(None).unwrap();
    let chain = sign(control, folder, &key.csr_pem, &folder.token("client")).await.unwrap();
    let (roots, own) = chain.split_last().unwrap();
    assert!(roots.contains(root.trim()), "{roots}");
    let identity = key.finish(own.concat().as_bytes()).unwrap();
    let trust = PeerCheck::new(Live::new(Roots::from_pem(root.as_bytes()).unwrap()));
    trust.verify(identity.chain(), Role::Client, SystemTime::now()).unwrap();
    chain
}

async fn status(control: &Control) -> Value {
    serde_json::from_str(&control.page("/debug/ca").await).unwrap()
}

fn plug_in(ca: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        fs::write(ca.join(name), text).unwrap();
    }
}

#[tokio::test]
async fn a_plugged_in_authority_is_replaced_without_a_restart() {
    let folder = Folder::new();
    let ca = folder.at("ca");
    fs::create_dir(&ca).unwrap();
    let old = authority("old root", None);
    let signer = authority("old signer", Some(&old));
    plug_in(
        &ca,
        &[
            ("root-cert.pem", &old.pem),
            ("ca-cert.pem", &signer.pem),
            ("ca-key.pem", &signer.key),
            ("cert-chain.pem", &format!("{}{}", signer.pem, old.pem)),
        ],
    );
    let mut control = folder.start("0").await;
    assert_eq!(chain(&control, &folder, &old.pem).await.len(), 3, "leaf, intermediate, root");
    let before = status(&control).await;
    assert_eq!((before["kind"].as_str(), before["problem"].as_str()), (Some("plugged-in"), None));

    let (code, message) = control.ask("POST", "/ca/rotate").await;
    assert!(code == 409 && message.contains("replace the files"), "{code} {message}");

    // The key without its certificate is not a valid authority, so the current one stays in use.
    let new = authority("new root", None);
    let both = format!("{}{}", old.pem, new.pem);
    plug_in(&ca, &[("root-cert.pem", &both), ("ca-key.pem", &new.key)]);
    let problem = control.logged("cannot be used").await;
    assert!(problem["problem"].as_str().unwrap().starts_with("ca-key.pem: "), "{problem}");
    assert!(control.page("/metrics").await.contains("skysail_ca_problem 1\n"));
    assert_eq!(chain(&control, &folder, &old.pem).await.len(), 3);

    fs::remove_file(ca.join("cert-chain.pem")).unwrap();
    plug_in(&ca, &[("ca-cert.pem", &new.pem)]);
    control.logged("plugged-in certificate authority replaced").await;
    let after = chain(&control, &folder, &new.pem).await;
    assert_eq!(after.len(), 2, "leaf, roots");
    assert!(after[1].contains(old.pem.trim()), "workloads trust all of root-cert.pem");
    // The control plane's own certificate is issued by the new authority.
    fs::write(ca.join("root-cert.pem"), &new.pem).unwrap();
    control.logged("plugged-in certificate authority replaced").await;
    chain(&control, &folder, &new.pem).await;
    assert_eq!(status(&control).await["roots"].as_array().unwrap().len(), 1);

    control.terminate().await;
    fs::remove_file(ca.join("ca-key.pem")).unwrap();
    let message = folder.refused(&[]).await;
    assert!(message.contains("ca-key.pem: there is no such file"), "{message}");
}

#[tokio::test]
async fn a_rotation_continues_after_a_restart() {
    let folder = Folder::new();
    let control = folder.start("0").await;
    let old = fs::read_to_string(folder.at("ca/root-cert.pem")).unwrap();
    assert_eq!(control.ask("POST", "/ca/rotate").await.0, 200);
    assert_eq!(status(&control).await["step"], "distribute");
    let both = chain(&control, &folder, &old).await;
    assert_eq!(both.last().unwrap().matches("BEGIN").count(), 2, "old and new are trusted");
    assert!(control.page("/metrics").await.contains("skysail_ca_step{step=\"distribute\"} 1\n"));
    let before = status(&control).await;
    control.child_killed().await;

    let control = folder.start("0").await;
    assert_eq!(status(&control).await, before, "the same roots, since and until the same time");
    assert_eq!(chain(&control, &folder, &old).await.last(), both.last());
    control.terminate().await;
}

#[tokio::test]
async fn invalid_requests_and_tokens_are_refused_with_a_reason() {
    let folder = Folder::new();
    // A second issuer, whose key is in a key set.
    let cluster = TokenIssuer::generate().unwrap();
    let jwks = folder.at("jwks.json");
    fs::write(&jwks, key_set(&folder.issuer)).unwrap();
    let mut control = folder.start_with("0", &["--token-jwks", jwks.to_str().unwrap()]).await;

    let csr = |id: Option<SpiffeId>| KeyAndCsr::generate(id.as_ref()).unwrap().csr_pem;
    let good = csr(Some(SpiffeId::new("cluster.local", "default", "client")));
    let token = folder.token("client");
    sign(&control, &folder, &good, &token).await.unwrap();
    let foreign = csr(Some(SpiffeId::new("cluster.local", "prod", "client")));
    let weak = include_str!("../../identity/src/csr/requests/rsa1024.pem");
    let long = "x".repeat(100_000);
    for (csr, words) in
        [(&*foreign, "it names spiffe"), (weak, "1024 bits"), (&format!("{good}{good}"), "several")]
    {
        let refused = sign(&control, &folder, csr, &token).await.unwrap_err();
        assert!(refused.message().contains(words), "{refused}");
    }
    assert_eq!(
        sign(&control, &folder, &long, &token).await.unwrap_err().code(),
        tonic::Code::ResourceExhausted
    );
    let metrics = control.page("/metrics").await;
    for reason in ["foreign_name", "key_size", "several"] {
        assert!(metrics.contains(&format!("skysail_csr_refusals{{reason=\"{reason}\"}} 1\n")), "{metrics}");
    }

    let account = |pod: Option<&str>| ServiceAccount {
        namespace: "default".into(),
        name: "client".into(),
        pod: pod.map(|name| BoundPod { name: name.to_owned(), uid: String::new() }),
    };
    let hour = Duration::from_secs(3600);
    let other = cluster.issue(&account(None), "istio-ca", hour).unwrap();
    assert!(sign(&control, &folder, &good, &other).await.is_err(), "the key of its issuer is not known yet");
    fs::write(&jwks, key_set(&cluster)).unwrap();
    control.logged("token keys replaced").await;
    sign(&control, &folder, &good, &other).await.unwrap();
    let elsewhere = cluster.issue(&account(None), "vault", hour).unwrap();
    let refused = sign(&control, &folder, &good, &elsewhere).await.unwrap_err();
    assert!(refused.message().contains("InvalidAudience"), "{refused}");

    // A token is refused after the end of its pod.
    let bound = cluster.issue(&account(Some("client-1")), "istio-ca", hour).unwrap();
    sign(&control, &folder, &good, &bound).await.unwrap();
    let pod = folder.at("config/pod.yaml");
    fs::write(&pod, "apiVersion: v1\nkind: Pod\nmetadata: {name: client-1, namespace: default}\nspec: {containers: [{name: a, image: b}]}\n").unwrap();
    control.logged("configuration published").await;
    sign(&control, &folder, &good, &bound).await.unwrap();
    fs::remove_file(&pod).unwrap();
    control.logged("configuration published").await;
    let refused = sign(&control, &folder, &good, &bound).await.unwrap_err();
    assert!(refused.message().contains("pod default/client-1, which no longer exists"), "{refused}");
}

#[tokio::test]
async fn the_certificate_limit_of_a_pod_does_not_affect_other_pods() {
    let folder = Folder::new();
    let control = folder.start("0").await;
    let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
    let token = |pod: &str| folder.token_of_pod("client", pod, pod);
    let mut refused = None;
    // The limit allows one more certificate every five seconds, so the number depends on the duration of the loop.
    for _ in 0..200 {
        refused = sign(&control, &folder, &csr, &token("client-1")).await.err();
        if refused.is_some() {
            break;
        }
    }
    let refused = refused.expect("200 certificates were issued to one pod");
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    sign(&control, &folder, &csr, &token("client-2")).await.unwrap();
    let metrics = control.page("/metrics").await;
    assert!(metrics.contains("skysail_certificates_over_quota 1\n"), "{metrics}");
}

#[tokio::test]
async fn an_expired_certificate_is_refused_on_an_open_connection() {
    let folder = Folder::new();
    let control = folder.start("0").await;
    let key = KeyAndCsr::generate(None).unwrap();
    let ask = |seconds| IstioCertificateRequest {
        csr: key.csr_pem.clone(),
        validity_duration: seconds,
        ..IstioCertificateRequest::default()
    };
    let none = MetadataMap::new();
    let first = create_certificate(connect(&control, &folder).await, bearer(&folder.token("client")), ask(3));
    let chain = first.await.unwrap().concat();
    let ended = key.finish(chain.as_bytes()).unwrap().not_after;
    let tls = ClientTlsConfig::new()
        .ca_certificate(folder.root())
        .identity(tonic::transport::Identity::from_pem(&chain, key.key_pem()));
    let channel = endpoint(&control.tls, tls).connect().await.unwrap();
    create_certificate(channel.clone(), none.clone(), ask(3)).await.unwrap();
    while SystemTime::now() < ended {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let refused = create_certificate(channel, none, ask(3)).await.unwrap_err();
    assert!(refused.message().contains("has expired since the connection was opened"), "{refused}");
}

#[tokio::test]
async fn lifetimes_are_limited_by_the_maximum_and_by_the_authority() {
    let folder = Folder::new();
    let control = folder.start_with("0", &["--cert-ttl", "2h", "--ca-root-ttl", "20h"]).await;
    let key = KeyAndCsr::generate(None).unwrap();
    for (requested, hours) in [(0, 2), (-1, 2), (i64::MIN, 2), (i64::MAX, 2), (3600, 1)] {
        let request = IstioCertificateRequest {
            csr: key.csr_pem.clone(),
            validity_duration: requested,
            ..IstioCertificateRequest::default()
        };
        let channel = connect(&control, &folder).await;
        let chain = create_certificate(channel, bearer(&folder.token("client")), request).await.unwrap();
        let left = key.finish(chain[0].as_bytes()).unwrap().not_after.duration_since(SystemTime::now());
        let hour = Duration::from_secs(3600);
        let left = left.unwrap();
        assert!(left <= hours * hour && left > hours * hour - hour / 2, "{requested}: {left:?}");
    }
    control.terminate().await;
    // Durations that clocks cannot add are refused at start.
    for option in ["--cert-ttl=18446744073709551615s", "--ca-root-ttl=99999999999d"] {
        let message = folder.refused(&[option]).await;
        assert!(message.contains("the maximum is 36500d"), "{message}");
    }
}

/// Returns a JSON Web Key Set with the key of an issuer, as API servers return it.
fn key_set(issuer: &TokenIssuer) -> String {
    let key = KeyPair::from_pem(issuer.private_pem()).unwrap();
    let point = key.der_bytes().to_vec();
    let text = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let (x, y) = (text(&point[1..33]), text(&point[33..]));
    json!({ "keys": [{ "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "x": x, "y": y }] })
        .to_string()
}

/// Workloads of `west` trust the roots of `east` for identities of `east`. The control plane does not.
#[tokio::test]
async fn the_control_plane_does_not_trust_roots_of_another_mesh() {
    let folder = Folder::new();
    let east = Authority::ephemeral().unwrap();
    let west = authority("west root", None);
    fs::create_dir(folder.at("ca")).unwrap();
    plug_in(
        &folder.at("ca"),
        &[("root-cert.pem", &west.pem), ("ca-cert.pem", &west.pem), ("ca-key.pem", &west.key)],
    );
    let west_ca = Authority::from_pem(&west.pem, &west.pem, &west.key, "").unwrap();
    let mesh = format!(
        "trustDomain: west\ntrustDomainAliases: [former, east]\ncaCertificates:\n- trustDomains: [east]\n  pem: |\n{}",
        indent(east.roots_pem(), 4)
    );
    let map = format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata:\n  mesh: |\n{}",
        indent(&mesh, 4)
    );
    fs::write(folder.at("config/mesh.yaml"), map).unwrap();
    let control = folder.start("0").await;
    let request_with = async |authority: &Authority, domain: &str| {
        let id = SpiffeId::new(domain, "default", "client");
        let key = KeyAndCsr::generate(Some(&id)).unwrap();
        let signed = authority.sign(&key.csr_pem, &id, Duration::from_secs(600)).unwrap();
        let identity = tonic::transport::Identity::from_pem(signed.chain[0].clone(), key.key_pem());
        let tls = ClientTlsConfig::new().ca_certificate(folder.root()).identity(identity);
        let channel = endpoint(&control.tls, tls).connect().await.map_err(|error| format!("{error:?}"))?;
        let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
        let request = IstioCertificateRequest { csr, ..IstioCertificateRequest::default() };
        create_certificate(channel, MetadataMap::new(), request).await.map_err(|status| format!("{status:?}"))
    };
    request_with(&west_ca, "west").await.unwrap();
    request_with(&west_ca, "former").await.unwrap();
    let refused = request_with(&west_ca, "east").await.unwrap_err();
    assert!(refused.contains("belongs to another trust domain"), "{refused}");
    for domain in ["west", "former", "east"] {
        let refused = request_with(&east, domain).await.unwrap_err();
        assert!(
            !refused.contains("belongs to another trust domain"),
            "the handshake refuses the chain before: {refused}"
        );
    }
    // The chain that workloads receive is their trust bundle for the control plane, so it must not contain the roots of
    // `east`.
    let chain = chain(&control, &folder, &west.pem).await;
    assert!(!chain.last().unwrap().contains(east.roots_pem().trim()), "{chain:?}");
}

fn indent(text: &str, by: usize) -> String {
    text.lines().map(|line| format!("{:by$}{line}\n", "")).collect()
}
