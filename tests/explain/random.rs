//! Random meshes and requests.

use std::{collections::BTreeSet, fmt::Write as _};

use super::edge::CLIENT_CERTIFICATES;

/// Number of services with random rules.
pub(crate) const SERVICES: usize = 12;
/// Number of services of connections.
pub(crate) const CONNECTION_SERVICES: usize = 4;
/// Issuer of the tokens.
const ISSUER: &str = "https://accounts.cinema.example";
/// RequestAuthentication with the issuer's keys.
const TOKENS: &str = include_str!("../../examples/tasks/jwt/tokens.yaml");
const GUEST: &str = include_str!("../../examples/tasks/jwt/guest.jwt");
const STAFF: &str = include_str!("../../examples/tasks/jwt/staff.jwt");
/// A gateway, and routes by which a test sees that it knows the pods.
const EDGE: &str = "\
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: edge, namespace: web}
spec:
  selector: {matchLabels: {istio: edge}}
  template:
    metadata: {labels: {app: edge, istio: edge}, annotations: {inject.istio.io/templates: gateway}}
    spec: {containers: [{name: istio-proxy, image: auto, ports: [{name: plain, containerPort: 8080}, {name: secure, containerPort: 8443}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: web}
spec: {selector: {istio: edge}, ports: [{name: http, port: 80, targetPort: plain}, {name: https, port: 443, targetPort: secure}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: probe, namespace: shop}
spec:
  selector: {istio: edge}
  servers: [{port: {number: 80, name: http, protocol: HTTP}, hosts: [probe.other]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: probe, namespace: shop}
spec:
  hosts: [probe.other]
  gateways: [probe]
  http:
    - {match: [{uri: {prefix: /v1}}], route: [{destination: {host: probe-v1}}]}
    - {match: [{uri: {prefix: /v2}}], route: [{destination: {host: probe-v2}}]}
    - {match: [{uri: {prefix: /v3}}], route: [{destination: {host: probe-v3}}]}
";
/// Clients: with a sidecar in the namespace of the services and in another one, and without a sidecar.
pub(crate) const CLIENTS: [&str; 3] = ["shop/front", "web/far", "shop/bare"];
pub(crate) const PATHS: [&str; 7] = ["/", "/a", "/a/b", "/A", "/ab", "/a/b/c", "/c"];
pub(crate) const VALUES: [&str; 3] = ["x", "xy", "z"];
pub(crate) const METHODS: [&str; 3] = ["GET", "POST", "DELETE"];
pub(crate) const VERSIONS: [&str; 3] = ["v1", "v2", "v3"];

/// Returns pods, and services without rules by which a test sees that sidecars know the pods.
pub(crate) fn pods() -> String {
    let pod = |namespace: &str, name: &str, labels: &str| {
        format!(
            "---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             ---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}\n\
             spec: {{serviceAccountName: {name}, containers: [{{name: c, image: i, ports: [{{containerPort: 8080}}, {{containerPort: 9000}}]}}]}}\n"
        )
    };
    let service = |name: &str, selector: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{selector: {{{selector}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
        )
    };
    let mut text = pod("shop", "front", "app: front");
    text += &pod("web", "far", "app: far");
    text += &pod("shop", "bare", "app: bare, sidecar.istio.io/inject: 'false'");
    for version in VERSIONS {
        text += &pod("shop", &format!("back-{version}"), &format!("app: back, version: {version}"));
        text += &service(&format!("probe-{version}"), &format!("app: back, version: {version}"));
    }
    for number in 0..SERVICES {
        text += &service(&format!("s{number}"), "app: back");
    }
    for number in 0..CONNECTION_SERVICES {
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: t{number}, namespace: shop}}\n\
             spec: {{selector: {{app: back}}, ports: [{{name: tcp, port: 9000, targetPort: 9000}}]}}\n"
        );
    }
    text + EDGE
}

/// Random configuration and requests.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) fastrand::Rng);

impl Random {
    pub(crate) fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.0.usize(..of.len())]
    }

    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.0.u32(..100) < percent
    }

    pub(crate) fn some(&mut self, of: &[&str]) -> String {
        let count = self.0.usize(1..=2);
        let chosen: BTreeSet<&str> = (0..count).map(|_| self.one(of)).collect();
        chosen.into_iter().map(|item| format!("{item:?}")).collect::<Vec<_>>().join(", ")
    }

    fn string(&mut self, of: &[&str]) -> String {
        let value = self.one(of);
        match self.0.u32(..4) {
            0 | 1 => format!("{{exact: {value:?}}}"),
            2 => format!("{{prefix: {value:?}}}"),
            _ => format!("{{regex: '{value}.*'}}"),
        }
    }

    fn matched(&mut self) -> String {
        let mut fields = Vec::new();
        if self.chance(60) {
            fields.push(format!("uri: {}", self.string(&PATHS)));
            if self.chance(20) {
                fields.push("ignoreUriCase: true".to_owned());
            }
        }
        for (field, chance) in [("headers", 40), ("withoutHeaders", 15)] {
            if self.chance(chance) {
                let test = if self.chance(25) { "{}".to_owned() } else { self.string(&VALUES) };
                fields.push(format!("{field}: {{x-user: {test}}}"));
            }
        }
        if self.chance(25) {
            fields.push(format!("method: {}", self.string(&METHODS)));
        }
        if self.chance(20) {
            fields.push(format!("queryParams: {{q: {}}}", self.string(&VALUES)));
        }
        if self.chance(15) {
            fields.push("sourceLabels: {app: front}".to_owned());
        }
        if self.chance(10) {
            fields.push("sourceNamespace: web".to_owned());
        }
        if self.chance(8) {
            fields.push(format!("gateways: [{}]", self.one(&["mesh", "web/edge-0", "web/secure-1"])));
        }
        if fields.is_empty() {
            fields.push("uri: {prefix: /}".to_owned());
        }
        format!("{{{}}}", fields.join(", "))
    }

    pub(crate) fn rule(&mut self, host: &str) -> String {
        let mut fields = Vec::new();
        if self.chance(80) {
            let matches: Vec<String> = (0..self.0.usize(1..=2)).map(|_| self.matched()).collect();
            fields.push(format!("match: [{}]", matches.join(", ")));
        }
        match self.0.u32(..10) {
            0 => fields.push("redirect: {uri: /moved, redirectCode: 302}".to_owned()),
            1 => fields.push("directResponse: {status: 418}".to_owned()),
            _ => {
                let first = self.0.u32(0..=100);
                let route = |weight: u32, subset: &str| {
                    format!("{{destination: {{host: {host}, subset: {subset}}}, weight: {weight}}}")
                };
                // v3 is not in every DestinationRule: then the cluster does not exist.
                let routes = [route(first, self.one(&VERSIONS)), route(100 - first, self.one(&VERSIONS))];
                let routes = match self.0.u32(..3) {
                    0 => format!("{{destination: {{host: {host}}}}}"),
                    1 => format!("{{destination: {{host: {host}, subset: {}}}}}", self.one(&VERSIONS)),
                    _ => routes.join(", "),
                };
                fields.push(format!("route: [{routes}]"));
                if self.chance(20) {
                    fields.push(format!("rewrite: {{uri: {}}}", self.one(&PATHS)));
                }
                if self.chance(10) {
                    fields.push("rewrite: {authority: other.example}".to_owned());
                    fields.dedup_by(|a, b| a.starts_with("rewrite") && b.starts_with("rewrite"));
                }
                if self.chance(20) {
                    let value = self.one(&VALUES);
                    fields.push(format!("headers: {{request: {{set: {{x-user: {value}}}}}}}"));
                }
                if self.chance(8) {
                    fields.push("fault: {abort: {httpStatus: 507, percentage: {value: 100}}}".to_owned());
                }
            }
        }
        format!("  - {{{}}}\n", fields.join(", "))
    }

    pub(crate) fn routing(&mut self) -> String {
        let mut text = String::new();
        for number in 0..SERVICES {
            let host = format!("s{number}.shop.svc.cluster.local");
            let subsets = VERSIONS.iter().take(self.0.usize(2..=3));
            let subsets: Vec<String> = subsets
                .map(|version| format!("{{name: {version}, labels: {{version: {version}}}}}"))
                .collect();
            let policy = match self.0.u32(..10) {
                0 | 1 => ", trafficPolicy: {tls: {mode: ISTIO_MUTUAL}}",
                2 => ", trafficPolicy: {tls: {mode: DISABLE}}",
                _ => "",
            };
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec: {{host: {host}{policy}, subsets: [{}]}}\n",
                subsets.join(", ")
            );
            let rules: String = (0..self.0.usize(1..=5)).map(|_| self.rule(&host)).collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{host}]\n  http:\n{rules}"
            );
        }
        text
    }

    fn policy_rule(&mut self) -> String {
        let mut fields = Vec::new();
        if self.chance(50) {
            let from = match self.0.u32(..5) {
                4 => format!("requestPrincipals: ['{ISSUER}/*']"),
                0 => "principals: [cluster.local/ns/shop/sa/front]".to_owned(),
                1 => "notPrincipals: [cluster.local/ns/web/sa/far]".to_owned(),
                2 => "namespaces: [web]".to_owned(),
                _ => "notNamespaces: [shop]".to_owned(),
            };
            fields.push(format!("from: [{{source: {{{from}}}}}]"));
        }
        if self.chance(60) {
            let to = match self.0.u32(..5) {
                0 => format!("methods: [{}]", self.some(&METHODS)),
                4 => format!("ports: ['{}']", self.one(&["8080", "9000"])),
                1 => format!("paths: [{}]", self.some(&["/a*", "/c", "/a/b", "*/c"])),
                2 => format!("notPaths: [{}]", self.some(&["/a*", "/c"])),
                _ => format!("hosts: [{}]", self.some(&["s1*", "s2.shop", "other.example"])),
            };
            fields.push(format!("to: [{{operation: {{{to}}}}}]"));
        }
        if self.chance(15) {
            fields.push("when: [{key: 'request.auth.claims[groups]', values: [staff]}]".to_owned());
        } else if fields.is_empty() || self.chance(30) {
            let values = self.some(&VALUES);
            let test = if self.chance(30) { "notValues" } else { "values" };
            fields.push(format!("when: [{{key: 'request.headers[x-user]', {test}: [{values}]}}]"));
        }
        format!("  - {{{}}}\n", fields.join(", "))
    }

    pub(crate) fn policies(&mut self) -> String {
        let mut text = String::new();
        for (number, version) in VERSIONS.iter().enumerate() {
            if self.chance(40) {
                let mode = self.one(&["STRICT", "PERMISSIVE"]);
                let _ = write!(
                    text,
                    "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: p{number}, namespace: shop}}\n\
                     spec: {{selector: {{matchLabels: {{version: {version}}}}}, mtls: {{mode: {mode}}}}}\n"
                );
            }
        }
        for number in 0..self.0.usize(2..=4) {
            let action = self.one(&["DENY", "DENY", "ALLOW"]);
            let version = self.one(&VERSIONS);
            let rules: String = (0..self.0.usize(1..=3)).map(|_| self.policy_rule()).collect();
            let _ = write!(
                text,
                "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: a{number}, namespace: shop}}\n\
                 spec:\n  selector: {{matchLabels: {{version: {version}}}}}\n  action: {action}\n  rules:\n{rules}"
            );
        }
        text
    }

    /// Returns VirtualServices of connections, by version and by the client's labels.
    pub(crate) fn connections(&mut self) -> String {
        let mut text = String::new();
        for number in 0..CONNECTION_SERVICES {
            let host = format!("t{number}.shop.svc.cluster.local");
            let mut rules = String::new();
            for _ in 0..self.0.usize(1..=2) {
                let matched = match self.0.u32(..3) {
                    0 => "match: [{port: 9000, sourceLabels: {app: front}}], ",
                    1 => "match: [{port: 9000}], ",
                    _ => "match: [{sourceNamespace: web}], ",
                };
                let first = self.0.u32(0..=100);
                let route = |weight: u32, subset: &str| {
                    format!("{{destination: {{host: {host}, subset: {subset}}}, weight: {weight}}}")
                };
                let routes = [route(first, self.one(&VERSIONS)), route(100 - first, self.one(&VERSIONS))];
                let _ = writeln!(rules, "  - {{{matched}route: [{}]}}", routes.join(", "));
            }
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: t{number}, namespace: shop}}\n\
                 spec: {{host: {host}, subsets: [{{name: v1, labels: {{version: v1}}}}, {{name: v2, labels: {{version: v2}}}}]}}\n\
                 ---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: t{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{host}]\n  tcp:\n{rules}"
            );
        }
        text
    }

    /// Returns Gateways of the edge and VirtualServices that are bound to them.
    pub(crate) fn gateways(&mut self) -> String {
        let mut text = String::new();
        for number in 0..2 {
            let servers: Vec<String> = (0..self.0.usize(1..=2))
                .map(|index| {
                    let hosts = self.some(&["a.example", "b.example", "*.example", "shop/c.other"]);
                    let redirect = if self.chance(15) { ", tls: {httpsRedirect: true}" } else { "" };
                    format!("{{port: {{number: 80, name: http-{index}, protocol: HTTP}}, hosts: [{hosts}]{redirect}}}")
                })
                .collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: edge-{number}, namespace: web}}\n\
                 spec: {{selector: {{istio: edge}}, servers: [{}]}}\n",
                servers.join(", ")
            );
        }
        for number in 0..4 {
            let hosts = self.some(&["a.example", "b.example", "*.example", "c.other"]);
            let gateways = self.some(&["web/edge-0", "web/edge-1"]);
            let backend = format!("s{}.shop.svc.cluster.local", self.0.usize(..SERVICES));
            let rules: String = (0..self.0.usize(1..=3)).map(|_| self.rule(&backend)).collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: edge-{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{hosts}]\n  gateways: [{gateways}]\n  http:\n{rules}"
            );
        }
        text
    }

    /// Returns RequestAuthentications of random versions, and of the edge.
    pub(crate) fn tokens(&mut self) -> String {
        let mut text = String::new();
        let keys = TOKENS.lines().find_map(|line| line.trim().strip_prefix("jwks: ")).unwrap_or_default();
        let selectors = VERSIONS.map(|version| ("shop", format!("version: {version}")));
        for (number, (namespace, labels)) in
            selectors.into_iter().chain([("web", "istio: edge".to_owned())]).enumerate()
        {
            if self.chance(60) {
                let forward = self.chance(50);
                let _ = write!(
                    text,
                    "---\napiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {{name: j{number}, namespace: {namespace}}}\n\
                     spec:\n  selector: {{matchLabels: {{{labels}}}}}\n  jwtRules:\n    - issuer: {ISSUER}\n      \
                     forwardOriginalToken: {forward}\n      jwks: {keys}\n"
                );
            }
        }
        text
    }

    /// Returns a request.
    pub(crate) fn request(&mut self) -> Request {
        let query = if self.chance(30) { format!("?q={}", self.one(&VALUES)) } else { String::new() };
        let path = format!("{}{query}", self.one(&PATHS));
        let mut headers = Vec::new();
        if self.chance(60) {
            headers.push(format!("x-user: {}", self.one(&VALUES)));
        }
        if self.chance(30) {
            headers.push(format!("authorization: Bearer {}", self.one(&[GUEST, STAFF, "forged"]).trim()));
        }
        let of = |from, url, method, headers| Request { from, url, method, headers, certificate: None };
        match self.0.u32(..16) {
            0..=5 => {
                let url = format!("http://s{}.shop{path}", self.0.usize(..SERVICES));
                of(self.one(&CLIENTS), url, self.one(&METHODS), headers)
            }
            6 | 7 => {
                let url = format!("tcp://t{}.shop:9000", self.0.usize(..CONNECTION_SERVICES));
                of(self.one(&CLIENTS), url, "GET", Vec::new())
            }
            8 | 9 => {
                let host = self.one(&["a.example", "b.example", "x.example", "c.other", "other"]);
                of("outside", format!("http://{host}{path}"), "GET", headers)
            }
            10 | 11 => {
                let host = self.one(&["ra.api", "rb.api", "x.api"]);
                of("outside", format!("http://{host}{path}"), "GET", headers)
            }
            12 => {
                let host = self.one(&["p.secure", "x.pass", "y.pass", "a.secure", "z.secure"]);
                of("outside", format!("tls://{host}:443"), "GET", Vec::new())
            }
            _ => {
                let host = self.one(&["a.secure", "b.secure", "m.secure", "m.secure", "x.members"]);
                let certificate = if self.chance(70) { Some(self.one(&CLIENT_CERTIFICATES)) } else { None };
                let request = of("outside", format!("https://{host}{path}"), "GET", headers);
                Request { certificate, ..request }
            }
        }
    }
}

/// A request of a client in the mesh, a connection to a service (`tcp://`), or a request or connection from outside.
#[derive(Debug)]
pub(crate) struct Request {
    /// Client; `outside` sends to the gateway.
    pub(crate) from: &'static str,
    /// URL.
    pub(crate) url: String,
    /// Method.
    pub(crate) method: &'static str,
    /// Headers, `NAME: VALUE`.
    pub(crate) headers: Vec<String>,
    /// Name of the certificate of a client of TLS; `None` for none.
    pub(crate) certificate: Option<&'static str>,
}

impl Request {
    /// Returns the arguments that `call` and `explain` share.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let headers = self.headers.iter().flat_map(|header| ["-H".to_owned(), header.clone()]);
        ["-X".to_owned(), self.method.to_owned()].into_iter().chain(headers).collect()
    }
}
