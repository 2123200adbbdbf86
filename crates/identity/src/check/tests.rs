use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, KeyUsagePurpose, SanType};

use super::{testing::TestRoot, *};

const HOUR: Duration = Duration::from_hours(1);

fn verify(check: &PeerCheck, chain: &[CertificateDer<'static>]) -> Result<(), String> {
    let verified = |role| check.verify(chain, role, SystemTime::now()).map_err(|error| error.to_string());
    assert_eq!(verified(Role::Client), verified(Role::Server));
    verified(Role::Client)
}

fn uris(uris: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
    params
}

#[test]
fn a_root_of_one_trust_domain_is_not_trusted_for_another() {
    let (west, east) = (TestRoot::new(), TestRoot::new());
    let domains = [("west", west.pem.as_bytes()), ("east", east.pem.as_bytes())];
    let roots = || Live::new(Roots::of_domains(domains).unwrap());
    let (front_west, front_east) = ("spiffe://west/ns/shop/sa/front", "spiffe://east/ns/shop/sa/front");
    let any = PeerCheck::new(roots());
    let names = vec![NameMatch::uri_prefix("spiffe://west/"), NameMatch::uri_prefix("spiffe://east/")];
    for check in [any, PeerCheck::spiffe(roots(), names)] {
        verify(&check, &west.leaf(uris(&[front_west]))).unwrap();
        verify(&check, &east.leaf(uris(&[front_east]))).unwrap();
        for forged in [east.leaf(uris(&[front_west])), west.leaf(uris(&[front_east]))] {
            let error = verify(&check, &forged).unwrap_err();
            assert!(error.contains("UnknownIssuer"), "{error}");
        }
        for (name, reason) in [
            (&[front_east, front_west][..], "has 2 URIs"),
            (&[front_west, front_east], "has 2 URIs"),
            (&[], "has 0 URIs"),
            (&["https://east/"], "is not a SPIFFE ID"),
            (&["spiffe://east"], "is not a SPIFFE ID"),
            (&["spiffe://EAST/ns/shop/sa/front"], "the trust domain \"EAST\""),
            (&["spiffe://north/ns/shop/sa/front"], "the trust domain \"north\""),
        ] {
            let error = verify(&check, &east.leaf(uris(name))).unwrap_err();
            assert!(error.contains(reason), "{name:?}: {error}");
        }
        let mut signs = uris(&[front_east]);
        signs.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
        let error = verify(&check, &east.leaf(signs)).unwrap_err();
        assert!(error.contains("may sign certificates"), "{error}");
    }
    let wants_dns = vec![NameMatch { kind: SanKind::Dns, ..NameMatch::uri("front.west") }];
    let mut both = uris(&[front_west]);
    both.subject_alt_names.push(SanType::DnsName("front.west".try_into().unwrap()));
    assert!(verify(&PeerCheck::spiffe(roots(), wants_dns), &west.leaf(both)).is_err());
    let twice = [("west", west.pem.as_bytes()), ("west", east.pem.as_bytes())];
    assert!(Roots::of_domains(twice).unwrap_err().to_string().contains("two bundles"));
}

#[test]
fn key_usage_is_enforced() {
    let root = TestRoot::new();
    let check = PeerCheck::new(Live::new(Roots::from_pem(root.pem.as_bytes()).unwrap()));
    let of = |usages: &[KeyUsagePurpose]| {
        let mut params = CertificateParams::default();
        params.key_usages = usages.to_vec();
        root.leaf(params)
    };
    verify(&check, &of(&[])).unwrap();
    verify(&check, &of(&[KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment])).unwrap();
    let error = verify(&check, &of(&[KeyUsagePurpose::KeyEncipherment])).unwrap_err();
    assert!(error.contains("keyUsage"), "{error}");
}

#[test]
fn a_pin_is_a_certificate_or_a_key() {
    let root = TestRoot::new();
    let chain = root.leaf(CertificateParams::default());
    let hash = |bytes: &[u8]| sha256(bytes).unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>();
    let (_, leaf) = x509_parser::parse_x509_certificate(&chain[0]).unwrap();
    let certificate = hex(&hash(&chain[0]));
    let key = STANDARD.encode(hash(leaf.public_key().raw));
    let other = Pin::key(&STANDARD.encode(hash(b"other"))).unwrap();
    let verify = |pins: Vec<Pin>| {
        let roots = Live::new(Roots::from_pem(root.pem.as_bytes()).unwrap());
        verify(&PeerCheck { pins, ..PeerCheck::new(roots) }, &chain)
    };
    verify(vec![Pin::certificate(&certificate.concat()).unwrap()]).unwrap();
    verify(vec![other, Pin::certificate(&certificate.join(":").to_uppercase()).unwrap()]).unwrap();
    verify(vec![Pin::key(&key).unwrap(), other]).unwrap();
    assert!(verify(vec![other]).unwrap_err().contains("fingerprints"));
    let long = format!("{}0", certificate.concat());
    for wrong in
        ["", "ab", &long, &certificate.concat().replace(&certificate[0], "zz"), &certificate.join(" ")]
    {
        assert_eq!(Pin::certificate(wrong), None, "{wrong}");
    }
    for wrong in ["", "AAAA", &key[1..]] {
        assert_eq!(Pin::key(wrong), None, "{wrong}");
    }
}

/// The proxy's tests compare the other revocation settings with Envoy.
#[test]
fn the_newest_list_of_an_issuer_is_used() {
    let root = TestRoot::new();
    let chain = root.leaf(CertificateParams::default());
    let (before, after) = (root.crl_of(&[], HOUR, 2 * HOUR), root.crl(&[1], HOUR));
    for lists in [format!("{before}{after}"), format!("{after}{before}")] {
        let roots = Roots::from_pem(root.pem.as_bytes()).unwrap();
        let roots = roots.with_crls(&Crls::from_pem(lists.as_bytes()).unwrap());
        let error = verify(&PeerCheck::new(Live::new(roots)), &chain).unwrap_err();
        assert!(error.contains("Revoked"), "{error}");
    }
    let with_roots = format!("{}{after}", root.pem);
    let check = PeerCheck::new(Live::new(Roots::from_pem(with_roots.as_bytes()).unwrap()));
    assert!(verify(&check, &chain).unwrap_err().contains("Revoked"));
    for wrong in ["", &root.pem] {
        assert!(Crls::from_pem(wrong.as_bytes()).is_err());
    }
}
