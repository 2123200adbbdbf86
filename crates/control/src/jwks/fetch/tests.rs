use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::*;

const KEYS: &str = r#"{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB"}]}"#;

fn fetcher() -> Fetcher {
    let servers = Servers::new(&[SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9)]);
    Fetcher { servers, metrics: Arc::default() }
}

/// Serves one answer per path and returns the base URL. `HERE` in an answer is the base URL.
async fn issuer(answers: &'static [(&'static str, &'static str, &'static str)]) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let here = base.clone();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let here = here.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(socket.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                let path = head.split(' ').nth(1).unwrap();
                let (_, status, rest) = answers.iter().find(|(known, ..)| *known == path).unwrap();
                let rest = rest.replace("HERE", &here);
                let answer = match status.starts_with('3') {
                    true => format!("HTTP/1.1 {status} X\r\nlocation: {rest}\r\ncontent-length: 0\r\n\r\n"),
                    false => {
                        format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{rest}", rest.len())
                    }
                };
                let _ = socket.write_all(answer.as_bytes()).await;
            });
        }
    });
    base
}

async fn fetch(source: KeySource) -> Result<Arc<str>, FetchError> {
    fetcher().fetch(&source, Duration::from_secs(30)).await
}

#[tokio::test]
async fn a_key_set_is_fetched_by_url_redirect_and_discovery() {
    let base = issuer(&[
        ("/keys", "200", KEYS),
        ("/moved", "302", "/keys"),
        ("/elsewhere", "307", "HERE/moved"),
        ("/.well-known/openid-configuration", "200", r#"{"jwks_uri": "HERE/keys"}"#),
    ])
    .await;
    for path in ["/keys", "/moved", "/elsewhere"] {
        let keys = fetch(KeySource::Uri(format!("{base}{path}").into())).await;
        assert_eq!(keys.as_deref(), Ok(KEYS), "{path}");
    }
    for issuer in [base.clone(), format!("{base}/")] {
        assert_eq!(fetch(KeySource::Issuer(issuer.into())).await.as_deref(), Ok(KEYS));
    }
}

#[tokio::test]
async fn other_answers_are_refused() {
    let base = issuer(&[
        ("/loop", "302", "/loop"),
        ("/missing", "404", KEYS),
        ("/secret", "200", "password=1"),
        ("/file", "302", "ftp://127.0.0.1/keys"),
        ("/metadata", "302", "http://169.254.169.254/latest"),
    ])
    .await;
    for (path, expected) in [
        ("/loop", "more than 3 redirects"),
        ("/missing", "status 404"),
        ("/secret", "the answer is not a key set"),
        ("/file", "neither http nor https"),
        ("/metadata", "not allowed"),
    ] {
        let error = fetch(KeySource::Uri(format!("{base}{path}").into())).await.unwrap_err();
        assert!(error.contains(expected), "{path}: {error}");
    }
}

#[tokio::test]
async fn a_large_answer_is_refused() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let _ = socket.write_all(b"HTTP/1.1 200 X\r\n\r\n").await;
        while socket.write_all(&[b' '; 4096]).await.is_ok() {}
    });
    let error = fetch(KeySource::Uri(url.into())).await.unwrap_err();
    assert!(error.contains("more than"), "{error}");
}

#[test]
fn addresses_of_metadata_services_are_forbidden() {
    for address in ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "fd00:ec2::254", "0.0.0.0"] {
        assert!(is_forbidden(address.parse().unwrap()), "{address}");
    }
    for address in ["127.0.0.1", "10.0.0.1", "192.0.2.1", "2001:db8::1"] {
        assert!(!is_forbidden(address.parse().unwrap()), "{address}");
    }
}

#[test]
fn redirects_do_not_leave_tls() {
    let target = FetchTarget::parse("https://keys.example.com/a").unwrap();
    assert!(target.redirected("http://keys.example.com/a").is_err());
    assert_eq!(target.redirected("/b").unwrap().uri, "https://keys.example.com/b");
    assert!(FetchTarget::parse("https://user@keys.example.com/").is_err());
}
