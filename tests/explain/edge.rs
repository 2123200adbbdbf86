//! Random gateways with TLS, and random routes of Gateway API.

use std::{fmt::Write as _, fs, path::PathBuf};

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use skysail_testkit::ClientCertificate;
use tempfile::TempDir;

use super::{
    certificates::{certificate, issuer, pem_block},
    random::{CONNECTION_SERVICES, METHODS, PATHS, Random, SERVICES, VALUES, VERSIONS},
};

/// Hosts of servers with TLS.
const TLS_HOSTS: [&str; 3] = ["a.secure", "b.secure", "c.secure"];
const MEMBER_HOSTS: [&str; 2] = ["m.secure", "*.members"];
const FORWARDED_HOSTS: [&str; 2] = ["p.secure", "*.pass"];
/// Hosts of the routes of Gateway API.
const ROUTE_HOSTS: [&str; 3] = ["ra.api", "rb.api", "*.api"];
/// Host of a server with TLS that a test asks whether the gateway has its certificate and its CA certificates.
pub(crate) const PROBE: &str = "probe.secure";
/// Names of client certificates: of the authority that the gateway trusts, and of another one.
pub(crate) const CLIENT_CERTIFICATES: [&str; 2] = ["member", "stranger"];

/// Certificates of the gateway and of its clients.
pub(crate) struct Certificates {
    folder: TempDir,
    root: CertificateDer<'static>,
    clients: Vec<ClientCertificate>,
    /// Secrets of the gateway.
    pub(crate) secrets: String,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let (root, other) = (issuer("root"), issuer("other"));
        let folder = tempfile::tempdir().unwrap();
        let mut clients = Vec::new();
        for (name, by) in CLIENT_CERTIFICATES.into_iter().zip([&root, &other]) {
            let (chain, key) = certificate(by, &["client.example"], 2125);
            fs::write(folder.path().join(name), chain.pem()).unwrap();
            clients.push((vec![chain.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into())));
        }
        let names = ["a.secure", "b.secure", "c.secure", "m.secure", "x.members", PROBE];
        let (chain, key) = certificate(&root, &names, 2125);
        let secrets = format!(
            "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: edge-tls, namespace: web}}\nstringData:\n  \
             tls.crt: |\n{}  tls.key: |\n{}  ca.crt: |\n{}",
            pem_block(&chain.pem()),
            pem_block(&key.serialize_pem()),
            pem_block(&root.pem())
        );
        Self { folder, root: root.der().clone(), clients, secrets }
    }

    /// Returns the root of the gateway's certificate.
    pub(crate) fn root(&self) -> CertificateDer<'static> {
        self.root.clone()
    }

    /// Returns a client's certificate and key.
    pub(crate) fn client(&self, name: &str) -> ClientCertificate {
        let position = CLIENT_CERTIFICATES.iter().position(|known| *known == name).unwrap();
        let (chain, key) = &self.clients[position];
        (chain.clone(), key.clone_key())
    }

    /// Returns the file with a client's certificate.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Random {
    /// Returns Gateways with TLS at port 443 of the edge: terminated, with client certificates, and forwarded by SNI.
    pub(crate) fn secure_gateways(&mut self) -> String {
        let mut text = format!(
            "---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: secure-probe, namespace: shop}}\n\
             spec:\n  selector: {{istio: edge}}\n  servers:\n  - port: {{number: 443, name: https-probe, protocol: HTTPS}}\n    \
             hosts: [{PROBE}]\n    tls: {{mode: MUTUAL, credentialName: edge-tls}}\n\
             ---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: secure-probe, namespace: shop}}\n\
             spec: {{hosts: [{PROBE}], gateways: [secure-probe], http: [{{directResponse: {{status: 200}}}}]}}\n"
        );
        for number in 0..2 {
            let server = |name: &str, protocol: &str, hosts: String, tls: String| {
                format!(
                    "{{port: {{number: 443, name: {name}, protocol: {protocol}}}, hosts: [{hosts}], tls: {{{tls}}}}}"
                )
            };
            let names = match self.0.u32(..3) {
                0 => ", subjectAltNames: [client.example]",
                1 => ", subjectAltNames: [other.example]",
                _ => "",
            };
            let servers = [
                server(
                    "a",
                    "HTTPS",
                    self.some(&TLS_HOSTS),
                    "mode: SIMPLE, credentialName: edge-tls".to_owned(),
                ),
                server(
                    "b",
                    "HTTPS",
                    self.some(&MEMBER_HOSTS),
                    format!(
                        "mode: {}, credentialName: edge-tls{names}",
                        self.one(&["MUTUAL", "OPTIONAL_MUTUAL"])
                    ),
                ),
                server("c", "TLS", self.some(&FORWARDED_HOSTS), "mode: PASSTHROUGH".to_owned()),
            ];
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: secure-{number}, namespace: web}}\n\
                 spec: {{selector: {{istio: edge}}, servers: [{}]}}\n",
                servers.join(", ")
            );
        }
        for number in 0..4 {
            let hosts = self.some(&[TLS_HOSTS[0], TLS_HOSTS[1], TLS_HOSTS[2], "m.secure", "x.members"]);
            let gateways = self.some(&["web/secure-0", "web/secure-1"]);
            let backend = format!("s{}.shop.svc.cluster.local", self.0.usize(..SERVICES));
            let rules: String = (0..self.0.usize(1..=2)).map(|_| self.rule(&backend)).collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: secure-{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{hosts}]\n  gateways: [{gateways}]\n  http:\n{rules}"
            );
        }
        text + &self.forwarded()
    }

    /// Returns VirtualServices of forwarded TLS.
    fn forwarded(&mut self) -> String {
        let mut text = String::new();
        for (number, host) in ["p.secure", "x.pass", "y.pass"].into_iter().enumerate() {
            let gateways = self.some(&["web/secure-0", "web/secure-1"]);
            let backend = format!("t{}.shop.svc.cluster.local", self.0.usize(..CONNECTION_SERVICES));
            // v3 is in no DestinationRule: then the cluster does not exist.
            let subset = self.one(&VERSIONS);
            let port = self.one(&["443", "443", "8443"]);
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: forwarded-{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{host}]\n  gateways: [{gateways}]\n  tls:\n  - match: [{{port: {port}, sniHosts: [{host}]}}]\n    \
                 route: [{{destination: {{host: {backend}, subset: {subset}, port: {{number: 9000}}}}}}]\n"
            );
        }
        text
    }

    /// Returns a Gateway of Gateway API at the edge, and HTTPRoutes.
    pub(crate) fn api_routes(&mut self) -> String {
        let mut text = "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: api, namespace: web}\n\
                        spec:\n  gatewayClassName: istio\n  addresses: [{type: Hostname, value: edge.web.svc.cluster.local}]\n  \
                        listeners:\n    - {name: http, port: 80, protocol: HTTP, hostname: '*.api', allowedRoutes: {namespaces: {from: All}}}\n"
            .to_owned();
        for number in 0..4 {
            let hosts = self.some(&ROUTE_HOSTS);
            let rules: String = (0..self.0.usize(1..=3)).map(|_| self.api_rule("")).collect();
            let _ = write!(
                text,
                "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: r{number}, namespace: shop}}\n\
                 spec:\n  parentRefs: [{{name: api, namespace: web}}]\n  hostnames: [{hosts}]\n  rules:\n{rules}"
            );
        }
        text
    }

    /// Returns a rule of an HTTPRoute. `within` adds the namespace of its backends.
    pub(crate) fn api_rule(&mut self, within: &str) -> String {
        let mut fields = Vec::new();
        let prefix = self.one(&PATHS).to_owned();
        let is_prefix = self.chance(40);
        if is_prefix {
            fields.push(format!("matches: [{{path: {{type: PathPrefix, value: {prefix}}}}}]"));
        } else if self.chance(80) {
            let matches: Vec<String> = (0..self.0.usize(1..=2)).map(|_| self.api_match()).collect();
            fields.push(format!("matches: [{}]", matches.join(", ")));
        }
        let mut filters = Vec::new();
        if self.chance(25) {
            let value = self.one(&VALUES);
            filters.push(format!(
                "{{type: RequestHeaderModifier, requestHeaderModifier: {{set: [{{name: x-user, value: {value}}}]}}}}"
            ));
        }
        let backend = |random: &mut Self| format!("name: s{}, port: 80{within}", random.0.usize(..SERVICES));
        match self.0.u32(..12) {
            0 => filters.push(
                "{type: RequestRedirect, requestRedirect: {hostname: moved.example, statusCode: 302}}"
                    .to_owned(),
            ),
            1 => fields.push("backendRefs: [{name: missing, port: 80}]".to_owned()),
            2 | 3 => {
                let weight = self.0.u32(0..=10);
                let (one, two) = (backend(self), backend(self));
                fields.push(format!("backendRefs: [{{{one}, weight: {weight}}}, {{{two}, weight: 3}}]"));
            }
            4 if is_prefix => {
                let path = self.one(&PATHS);
                filters.push(format!(
                    "{{type: URLRewrite, urlRewrite: {{path: {{type: ReplacePrefixMatch, replacePrefixMatch: {path}}}}}}}"
                ));
                fields.push(format!("backendRefs: [{{{}}}]", backend(self)));
            }
            5 => {
                filters.push(
                    "{type: URLRewrite, urlRewrite: {hostname: other.example, path: {type: ReplaceFullPath, replaceFullPath: /c}}}"
                        .to_owned(),
                );
                fields.push(format!("backendRefs: [{{{}}}]", backend(self)));
            }
            _ => fields.push(format!("backendRefs: [{{{}}}]", backend(self))),
        }
        if !filters.is_empty() {
            fields.push(format!("filters: [{}]", filters.join(", ")));
        }
        format!("  - {{{}}}\n", fields.join(", "))
    }

    fn api_match(&mut self) -> String {
        let mut fields = Vec::new();
        if self.chance(70) {
            let kind = self.one(&["Exact", "PathPrefix"]);
            fields.push(format!("path: {{type: {kind}, value: {}}}", self.one(&PATHS)));
        }
        if self.chance(40) {
            let kind = self.one(&["Exact", "RegularExpression"]);
            fields.push(format!("headers: [{{type: {kind}, name: x-user, value: {}}}]", self.one(&VALUES)));
        }
        if self.chance(25) {
            fields.push(format!("method: {}", self.one(&METHODS)));
        }
        if self.chance(25) {
            fields.push(format!("queryParams: [{{name: q, value: {}}}]", self.one(&VALUES)));
        }
        format!("{{{}}}", fields.join(", "))
    }
}
