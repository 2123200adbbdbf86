//! Ingress: certificates by host, and ports of backends, served by `skysail-proxy` and by a real Envoy.

use skysail_testkit::{Client, wait_response};

use crate::{
    gateway_api_certificates::{client, issuer, secret},
    mesh_with,
};

const RULES: &str = include_str!("ingress_tls.yaml");

#[test]
fn hosts_have_certificates_and_backends_have_ports() {
    let (web, more) = (issuer("web"), issuer("more"));
    let secrets = [
        secret("shop/web", &web, &["web.example", "plain.example", "far.example"], &web),
        secret("shop/more", &more, &["more.example"], &more),
    ];
    let mut setup = mesh_with(&[RULES, &secrets.concat()].concat(), &["shop/edge-envoy"]);
    for gateway in ["edge-skysail", "edge-envoy"] {
        setup = setup.with(&["-p", &format!("0:{gateway}:80"), "-p", &format!("0:{gateway}:443")]);
    }
    let mesh = setup.ready();
    for gateway in ["edge-skysail", "edge-envoy"] {
        let address = |port: u16| mesh.published(&format!("shop/{gateway}:{port}"));
        let plain = Client::plain(address(80));
        let trusting = |issuer| client(address(443), issuer, None);
        let reaches = |client: &Client, host: &str, path: &str, pod: &str| {
            let request = || client.get(host, path, "");
            wait_response(&format!("{host}{path} reaches {pod} through {gateway}"), 200, pod, request);
        };
        for client in [&plain, &trusting(&web)] {
            reaches(client, "web.example", "/one/open", "api-v1");
            reaches(client, "web.example", "/two/open", "api-v2");
            for path in ["/one/closed", "/two/closed"] {
                assert_eq!(client.status("web.example", path), Ok(503), "{gateway} {path}");
            }
            assert_eq!(client.status("web.example", "/"), Ok(404), "{gateway} has a default backend");
        }
        reaches(&trusting(&more), "more.example", "/", "api-v1");
        reaches(&trusting(&web), "far.example", "/", "outsider");
        reaches(&plain, "plain.example", "/", "api-v2");
        // Each host has its own certificate, and a host of no certificate is not served.
        for (issuer, host) in [(&web, "more.example"), (&more, "web.example"), (&web, "plain.example")] {
            let answer = trusting(issuer).get(host, "/", "");
            assert!(answer.is_err(), "{gateway} {host}: {answer:?}");
        }
    }
}
