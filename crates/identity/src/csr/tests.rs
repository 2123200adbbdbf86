use super::*;
use crate::request::KeyAndCsr;

/// A request made with OpenSSL.
macro_rules! request {
    ($name:literal) => {
        include_str!(concat!("requests/", $name, ".pem"))
    };
}

fn caller() -> SpiffeId {
    SpiffeId::new("cluster.local", "default", "reviews")
}

/// Returns the reason for refusing a request.
fn judge(text: &str) -> Result<(), &'static str> {
    let judged = Csr::from_pem(text).and_then(|csr| csr.names_only(&caller(), &["old.domain".into()]));
    judged.map_err(|refusal| Refusal::REASONS[refusal.index()])
}

#[test]
fn supported_keys_are_accepted() {
    for good in [
        request!("p256"),
        request!("p384"),
        request!("p521"),
        request!("rsa2048"),
        request!("ed25519"),
        request!("nobody"),
        &request!("p256").replace('\n', "\r\n"),
        &request!("p256").replace("CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST"),
    ] {
        assert_eq!(judge(good), Ok(()), "{good}");
    }
}

#[test]
fn each_fault_has_its_reason() {
    let good = request!("p256");
    for (name, text, reason) in [
        ("too long", &*"x".repeat(MAX_LENGTH + 1), "too_long"),
        ("empty", "", "not_pem"),
        ("another block", &good.replace("CERTIFICATE REQUEST", "CERTIFICATE"), "not_pem"),
        ("no end", good.split("-----END").next().unwrap(), "trailing"),
        ("broken Base64", &good.replacen("MII", "M*I", 1), "not_pem"),
        ("two", &format!("{good}{good}"), "several"),
        ("a key with it", &format!("{good}-----BEGIN PRIVATE KEY-----\n"), "several"),
        ("text before", &format!("Certificate Request:\n{good}"), "trailing"),
        ("text after", &format!("{good}more"), "trailing"),
        ("RSA 1024", request!("rsa1024"), "key_size"),
        ("secp256k1", request!("secp256k1"), "key_kind"),
        ("P-224", request!("p224"), "key_kind"),
        ("Ed448", request!("ed448"), "key_kind"),
        ("SHA-1", request!("rsa_sha1"), "weak_signature"),
        ("ECDSA with SHA-1", request!("p256_sha1"), "weak_signature"),
        ("MD5", request!("rsa_md5"), "weak_signature"),
        ("a host", request!("host"), "foreign_name"),
        ("an authority", request!("authority"), "wants_authority"),
    ] {
        assert_eq!(judge(text), Err(reason), "{name}");
    }
}

/// Returns a request with modified bytes.
fn changed(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut der = pem::parse(request!("p256")).unwrap().into_contents();
    change(&mut der);
    pem::encode(&pem::Pem::new("CERTIFICATE REQUEST", der))
}

#[test]
fn modified_requests_are_refused() {
    assert_eq!(judge(&changed(|_| {})), Ok(()));
    assert_eq!(judge(&changed(|der| der.push(0))), Err("trailing"));
    assert_eq!(judge(&changed(|der| der.truncate(der.len() - 1))), Err("malformed"));
    assert_eq!(judge(&changed(|der| *der.last_mut().unwrap() ^= 1)), Err("foreign_signature"));
    // The name of another workload instead of the signed one.
    let renamed = changed(|der| {
        let at = der.windows(7).position(|part| part == b"reviews").unwrap();
        der[at..at + 7].copy_from_slice(b"ratings");
    });
    assert_eq!(judge(&renamed), Err("foreign_signature"));
    // The key of another workload.
    let stolen = changed(|der| {
        let other = pem::parse(request!("authority")).unwrap().into_contents();
        let key = |der: &[u8]| der.windows(4).position(|part| part == [0x03, 0x42, 0x00, 0x04]).unwrap();
        let (to, from) = (key(der), key(&other));
        der[to..to + 68].copy_from_slice(&other[from..from + 68]);
        der[to + 20] ^= 1;
    });
    assert_eq!(judge(&stolen), Err("foreign_signature"));
}

#[test]
fn a_request_contains_no_name_or_the_callers() {
    let named = |id: &SpiffeId| judge(&KeyAndCsr::generate(Some(id)).unwrap().csr_pem);
    assert_eq!(judge(&KeyAndCsr::generate(None).unwrap().csr_pem), Ok(()));
    assert_eq!(named(&caller()), Ok(()));
    assert_eq!(named(&SpiffeId::new("old.domain", "default", "reviews")), Ok(()), "an alias");
    for foreign in [
        SpiffeId::new("cluster.local", "default", "ratings"),
        SpiffeId::new("cluster.local", "prod", "reviews"),
        SpiffeId::new("elsewhere", "default", "reviews"),
    ] {
        assert_eq!(named(&foreign), Err("foreign_name"), "{foreign}");
    }
}

#[test]
fn every_reason_has_one_index() {
    let size = Refusal::REASONS.len();
    let mut reasons = Refusal::REASONS.to_vec();
    reasons.sort_unstable();
    reasons.dedup();
    assert_eq!((reasons.len(), Refusal::WantsAuthority.index()), (size, size - 1));
}
