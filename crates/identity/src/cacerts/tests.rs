use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, SignatureAlgorithm,
};
use skysail_core::SpiffeId;

use super::*;
use crate::{Live, PeerCheck, Roots, check::Role, request::KeyAndCsr};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Certificate and key of an authority.
struct Made {
    pem: String,
    key: String,
    issuer: Issuer<'static, KeyPair>,
}

/// Returns an authority with this name under another; `change` is applied last.
fn made_of(
    kind: &'static SignatureAlgorithm,
    name: &str,
    above: Option<&Made>,
    change: impl FnOnce(&mut CertificateParams),
) -> Made {
    let pair = KeyPair::generate_for(kind).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.not_before = (SystemTime::now() - DAY).into();
    params.not_after = (SystemTime::now() + 100 * DAY).into();
    change(&mut params);
    let certificate = match above {
        Some(above) => params.signed_by(&pair, &above.issuer).unwrap(),
        None => params.self_signed(&pair).unwrap(),
    };
    let key = pair.serialize_pem();
    Made { pem: certificate.pem(), key, issuer: Issuer::from_ca_cert_der(certificate.der(), pair).unwrap() }
}

fn made(name: &str, above: Option<&Made>, change: impl FnOnce(&mut CertificateParams)) -> Made {
    made_of(&PKCS_ECDSA_P256_SHA256, name, above, change)
}

/// Returns the error of an invalid authority.
fn refused(roots: &str, certificate: &str, key: &str, chain: &str) -> String {
    Authority::from_pem(roots, certificate, key, chain).unwrap_err().to_string()
}

#[test]
fn an_intermediate_signs_and_the_root_is_trusted() {
    let root = made("root", None, |_| {});
    let middle = made("middle", Some(&root), |_| {});
    let signer = made("signer", Some(&middle), |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.not_after = (SystemTime::now() + 10 * DAY).into();
    });
    let other = made("other", None, |params| params.not_after = (SystemTime::now() - DAY / 2).into());
    let roots = format!("{}{}", root.pem, other.pem);
    // With and without the signing certificate and the root, because both forms are common.
    for chain in [
        format!("{}{}", signer.pem, middle.pem),
        middle.pem.clone(),
        format!("{}{}{}", signer.pem, middle.pem, root.pem),
    ] {
        let authority = Authority::from_pem(&roots, &signer.pem, &signer.key, &chain).unwrap();
        let left = authority.not_after().duration_since(SystemTime::now()).unwrap();
        assert!(left > 9 * DAY && left < 11 * DAY, "the first end counts, not that of other roots: {left:?}");
        let request = KeyAndCsr::generate(None).unwrap();
        let signed = authority.sign(&request.csr_pem, &SpiffeId::new("a", "b", "c"), DAY).unwrap();
        assert_eq!(signed.chain.len(), 4, "leaf, two intermediates, roots");
        assert_eq!(certificates(signed.chain[3].as_bytes(), "roots").unwrap().len(), 2);
        let identity = request.finish(signed.chain[..3].concat().as_bytes()).unwrap();
        let trust = PeerCheck::new(Live::new(Roots::from_pem(root.pem.as_bytes()).unwrap()));
        trust.verify(identity.chain(), Role::Client, SystemTime::now()).unwrap();
    }
}

#[test]
fn roots_of_the_same_name_are_distinguished_by_their_keys() {
    let until = |days: u32| {
        move |params: &mut CertificateParams| params.not_after = (SystemTime::now() + days * DAY).into()
    };
    let ended = made("root", None, |params| params.not_after = (SystemTime::now() - DAY / 2).into());
    let (soon, later) = (made("root", None, until(5)), made("root", None, until(50)));
    let signer = made("signer", Some(&soon), until(30));
    let roots = format!("{}{}{}", ended.pem, later.pem, soon.pem);
    for (certificate, key, days) in [(&signer.pem, &signer.key, 5), (&later.pem, &later.key, 50)] {
        let authority = Authority::from_pem(&roots, certificate, key, "").unwrap();
        let left = authority.not_after().duration_since(SystemTime::now()).unwrap();
        assert!(
            left <= days * DAY && left > (days - 1) * DAY,
            "nothing outlives the root it leads to: {left:?}"
        );
        assert_eq!(authority.described().iter().filter(|root| root.signs).count(), 1);
    }
}

#[test]
fn keys_of_other_kinds_sign_too() {
    for kind in [&PKCS_ECDSA_P384_SHA384, &PKCS_RSA_SHA256, &PKCS_ED25519] {
        let root = made_of(kind, "root", None, |_| {});
        let authority = Authority::from_pem(&root.pem, &root.pem, &root.key, "").unwrap();
        let request = KeyAndCsr::generate(None).unwrap();
        authority.sign(&request.csr_pem, &SpiffeId::new("a", "b", "c"), DAY).unwrap();
    }
}

#[test]
fn every_error_names_the_file() {
    let now = SystemTime::now();
    let root = made("root", None, |_| {});
    let signer = made("signer", Some(&root), |_| {});
    let stranger = made("stranger", None, |_| {});
    let leaf = made("leaf", Some(&root), |params| params.is_ca = IsCa::ExplicitNoCa);
    let reader = made("reader", Some(&root), |p| p.key_usages = vec![KeyUsagePurpose::CrlSign]);
    let ended = made("ended", Some(&root), |params| params.not_after = (now - DAY / 2).into());
    let early = made("early", Some(&root), |params| params.not_before = (now + DAY / 2).into());
    let narrow = made("narrow", None, |p| p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let under = made("under", Some(&narrow), |_| {});
    let between = made("between", Some(&root), |p| p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let lower = made("lower", Some(&between), |_| {});
    let below = made("below", Some(&signer), |_| {});
    let twice = format!("{0}{0}", signer.pem);
    let half = &root.pem[..root.pem.len() / 2];
    for (roots, certificate, key, chain, file, words) in [
        ("", &*signer.pem, &*signer.key, "", "root-cert.pem", "no certificate"),
        (half, &signer.pem, &signer.key, "", "root-cert.pem", ""),
        (&root.pem, "text", &signer.key, "", "ca-cert.pem", "no certificate"),
        (&root.pem, &twice, &signer.key, "", "ca-cert.pem", "several"),
        (&root.pem, &signer.pem, "text", "", "ca-key.pem", "private key"),
        (&root.pem, &signer.pem, &stranger.key, "", "ca-key.pem", "not the key of"),
        (&root.pem, &signer.pem, &signer.key, "text", "cert-chain.pem", "no certificate"),
        (&root.pem, &leaf.pem, &leaf.key, "", "ca-cert.pem", "CA:TRUE"),
        (&root.pem, &reader.pem, &reader.key, "", "ca-cert.pem", "keyCertSign"),
        (&root.pem, &ended.pem, &ended.key, "", "ca-cert.pem", "expired at"),
        (&root.pem, &early.pem, &early.key, "", "ca-cert.pem", "not valid before"),
        (&stranger.pem, &signer.pem, &signer.key, "", "cert-chain.pem", "up to a root"),
        (&root.pem, &below.pem, &below.key, "", "cert-chain.pem", "up to a root"),
        (&narrow.pem, &under.pem, &under.key, "", "root-cert.pem", "path length"),
        (&root.pem, &lower.pem, &lower.key, &between.pem, "cert-chain.pem", "PathLenConstraintViolated"),
    ] {
        let message = refused(roots, certificate, key, chain);
        assert!(
            message.starts_with(&format!("{file}: ")) && message.contains(words),
            "{file}, {words}: {message}"
        );
    }
}
