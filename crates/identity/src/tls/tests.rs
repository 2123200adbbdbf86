//! Handshakes over in-memory pipes between configurations of [`TlsSpec`].

use std::time::Duration;

use skysail_core::SpiffeId;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::{NameMatch, Peer, Roots, authority::Authority, request::KeyAndCsr};

const HOUR: Duration = Duration::from_secs(3600);

fn id(account: &str) -> SpiffeId {
    SpiffeId::new("cluster.local", "default", account)
}

fn identity(authority: &Authority, account: &str) -> Identity {
    let request = KeyAndCsr::generate(None).unwrap();
    let signed = authority.sign(&request.csr_pem, &id(account), HOUR).unwrap();
    request.finish(signed.pem().as_bytes()).unwrap()
}

fn mesh(authority: &Authority, account: &str, accepted: Vec<NameMatch>) -> TlsSpec {
    TlsSpec {
        identities: vec![Live::new(identity(authority, account))],
        peer: Some(PeerCheck::spiffe(Live::new(authority.roots().unwrap()), accepted)),
        alpn: vec![b"istio".to_vec()],
        ..TlsSpec::default()
    }
}

/// Performs a handshake; returns the peer that each side sees, or the first error.
async fn handshake(server: &TlsSpec, client: &TlsSpec) -> Result<(Option<Peer>, Peer), String> {
    let (near, far) = tokio::io::duplex(16 * 1024);
    let acceptor = TlsAcceptor::from(server.server().unwrap());
    let connector = TlsConnector::from(client.client().unwrap());
    let name = ServerName::try_from("reviews.test").unwrap();
    let accept = async {
        let mut stream = acceptor.accept(far).await.map_err(|error| error.to_string())?;
        stream.write_all(b"ok").await.map_err(|error| error.to_string())?;
        stream.flush().await.map_err(|error| error.to_string())?;
        let certificates = stream.get_ref().1.peer_certificates();
        Ok::<_, String>(certificates.map(|chain| Peer::from_der(&chain[0]).unwrap()))
    };
    let connect = async {
        let mut stream = connector.connect(name, near).await.map_err(|error| error.to_string())?;
        // In TLS 1.3 a client receives the refusal of its certificate only when it reads.
        let mut word = [0; 2];
        stream.read_exact(&mut word).await.map_err(|error| error.to_string())?;
        Ok::<_, String>(Peer::from_der(&stream.get_ref().1.peer_certificates().unwrap()[0]).unwrap())
    };
    let (accepted, connected) = tokio::join!(accept, connect);
    match (accepted, connected) {
        (Ok(client), Ok(server)) => Ok((client, server)),
        (Err(error), _) if !error.contains("AlertReceived") && !error.contains("received fatal alert") => {
            Err(error)
        }
        (_, Err(error)) | (Err(error), _) => Err(error),
    }
}

#[tokio::test]
async fn each_side_sees_the_others_identity() {
    let authority = Authority::ephemeral().unwrap();
    let server = mesh(&authority, "reviews", vec![NameMatch::uri_prefix("spiffe://cluster.local/")]);
    let client = mesh(&authority, "productpage", vec![NameMatch::uri(id("reviews").to_string())]);
    let (seen_by_server, seen_by_client) = handshake(&server, &client).await.unwrap();
    assert_eq!(seen_by_server.unwrap().spiffe, Some(id("productpage")));
    assert_eq!(seen_by_client.spiffe, Some(id("reviews")));
    assert_eq!(seen_by_client.uris.len(), 1, "names in the request must not reach the certificate");
}

#[tokio::test]
async fn unaccepted_peers_are_refused() {
    let authority = Authority::ephemeral().unwrap();
    let any = || vec![NameMatch::uri_prefix("spiffe://cluster.local/")];
    let server = mesh(&authority, "reviews", any());

    let wants_other = mesh(&authority, "productpage", vec![NameMatch::uri(id("ratings").to_string())]);
    let error = handshake(&server, &wants_other).await.unwrap_err();
    assert!(error.contains("ratings") && error.contains("/sa/reviews"), "{error}");

    let stranger = mesh(&Authority::ephemeral().unwrap(), "productpage", any());
    let trusting = TlsSpec { peer: server.peer.clone(), ..stranger.clone() };
    assert!(handshake(&server, &stranger).await.is_err(), "a server of another authority");
    assert!(handshake(&server, &trusting).await.is_err(), "a client of another authority");

    let nobody = TlsSpec { identities: Vec::new(), ..mesh(&authority, "productpage", any()) };
    assert!(handshake(&server, &nobody).await.is_err(), "a client without a certificate");
    let mut lenient = server.clone();
    lenient.peer.as_mut().unwrap().required = false;
    assert_eq!(handshake(&lenient, &nobody).await.unwrap().0, None);
}

#[tokio::test]
async fn a_renewed_certificate_and_a_new_root_take_effect_at_once() {
    let (old, new) = (Authority::ephemeral().unwrap(), Authority::ephemeral().unwrap());
    let server = mesh(&old, "reviews", Vec::new());
    let client = mesh(&old, "productpage", Vec::new());
    handshake(&server, &client).await.unwrap();

    server.identities[0].set(Arc::new(identity(&new, "reviews")));
    assert!(handshake(&server, &client).await.is_err());
    let both = format!("{}{}", old.roots_pem(), new.roots_pem());
    client.peer.as_ref().unwrap().roots.set(Arc::new(Roots::from_pem(both.as_bytes()).unwrap()));
    handshake(&server, &client).await.unwrap();
}

#[tokio::test]
async fn a_server_can_be_verified_by_host_name() {
    let authority = Authority::ephemeral().unwrap();
    let serving = |name: &str| TlsSpec {
        identities: vec![Live::new(authority.server(&id("istiod"), &[name.into()], &[], HOUR).unwrap())],
        ..TlsSpec::default()
    };
    let client = TlsSpec {
        peer: Some(PeerCheck { host_name: true, ..PeerCheck::new(Live::new(authority.roots().unwrap())) }),
        ..TlsSpec::default()
    };
    handshake(&serving("reviews.test"), &client).await.unwrap();
    assert!(handshake(&serving("other.test"), &client).await.is_err());
}

#[tokio::test]
async fn without_roots_or_a_common_version_the_handshake_fails() {
    let authority = Authority::ephemeral().unwrap();
    let server = mesh(&authority, "reviews", Vec::new());
    let mut client = mesh(&authority, "productpage", Vec::new());
    client.peer.as_mut().unwrap().roots = Live::empty();
    assert!(handshake(&server, &client).await.is_err());

    let old = TlsSpec { max_version: Some(Version::Tls12), ..server.clone() };
    let modern = TlsSpec { min_version: Version::Tls13, ..mesh(&authority, "productpage", Vec::new()) };
    assert!(handshake(&old, &modern).await.is_err());
    handshake(&old, &mesh(&authority, "productpage", Vec::new())).await.unwrap();
    let empty = TlsSpec { min_version: Version::Tls13, max_version: Some(Version::Tls12), ..server };
    assert!(empty.server().is_err());
}
