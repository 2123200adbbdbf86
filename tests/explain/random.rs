//! Random meshes and requests.

use std::{collections::BTreeSet, fmt::Write as _};

use super::{
    edge::CLIENT_CERTIFICATES,
    outbound::{ENTRIES, ROUTED_SERVICES},
    patches::{AUTHORIZERS, PROVIDERS},
};

/// Number of services with random rules.
pub(crate) const SERVICES: usize = 9;
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
/// Paths that proxies normalize.
const ODD_PATHS: [&str; 6] = ["/a//b", "/a/./b", "/c/../a", "/%61", "/a%2Fb", "/a/b/"];
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
    for (prefix, count) in [("s", SERVICES), ("g", ROUTED_SERVICES)] {
        for number in 0..count {
            text += &service(&format!("{prefix}{number}"), "app: back");
        }
    }
    for number in 0..CONNECTION_SERVICES {
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: t{number}, namespace: shop}}\n\
             spec: {{selector: {{app: back}}, ports: [{{name: tcp, port: 9000, targetPort: 9000}}]}}\n"
        );
    }
    text + EDGE + AUTHORIZERS
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
        if self.chance(8) {
            let host = self.one(&["s1.shop", "s2.shop", "a.example", "e1.ext"]);
            fields.push(format!(
                "match: [{{authority: {{exact: {host}}}}}, {{scheme: {{exact: http}}, port: 80}}]"
            ));
            fields.reverse();
            fields.truncate(1);
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
                self.quiet_fields(&mut fields);
                if self.chance(20) {
                    fields.push(format!("rewrite: {{uri: {}}}", self.one(&PATHS)));
                }
                if self.chance(10) {
                    fields.push("rewrite: {authority: other.example}".to_owned());
                    fields.dedup_by(|a, b| a.starts_with("rewrite") && b.starts_with("rewrite"));
                } else if self.chance(8) && !fields.iter().any(|field| field.starts_with("rewrite")) {
                    let rewrite = r"uriRegexRewrite: {match: '^/a(.*)', rewrite: '/r\1'}";
                    fields.push(format!(
                        "rewrite: {{{rewrite}, authority: {}}}",
                        self.one(&["w.example", "s1.shop"])
                    ));
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
            let subsets = self.subsets();
            let policy = self.traffic_policy();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec: {{host: {host}{policy}, subsets: [{subsets}]}}\n"
            );
            let rules: String = (0..self.0.usize(1..=5))
                .map(|_| if self.chance(20) { self.delegating_rule() } else { self.rule(&host) })
                .collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{host}]\n  http:\n{rules}"
            );
        }
        text + &self.delegates()
    }

    fn policy_rule(&mut self) -> String {
        let mut fields = Vec::new();
        if self.chance(50) {
            let from = match self.0.u32(..7) {
                5 => format!("ipBlocks: [10.244.0.{}/30]", self.one(&["4", "8"])),
                6 => "remoteIpBlocks: [203.0.113.0/24]".to_owned(),
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
                let mode = self.one(&["STRICT", "PERMISSIVE", "UNSET"]);
                let port = match self.0.u32(..4) {
                    0 => ", portLevelMtls: {8080: {mode: STRICT}}",
                    1 => ", portLevelMtls: {9000: {mode: DISABLE}}",
                    _ => "",
                };
                let _ = write!(
                    text,
                    "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
                     metadata: {{name: p{number}, namespace: shop}}\nspec: \
                     {{selector: {{matchLabels: {{version: {version}}}}}, mtls: {{mode: {mode}}}{port}}}\n"
                );
            }
        }
        for number in 0..self.0.usize(2..=4) {
            let action = match self.0.u32(..6) {
                0 => "AUDIT".to_owned(),
                1 | 2 => "ALLOW".to_owned(),
                _ => "DENY".to_owned(),
            };
            text += &self.policy(&format!("a{number}"), &action);
        }
        for number in 0..self.0.usize(..=2) {
            let provider = self.one(&[PROVIDERS[0], PROVIDERS[0], PROVIDERS[1], PROVIDERS[2]]);
            text += &self.policy(&format!("c{number}"), &format!("CUSTOM\n  provider: {{name: {provider}}}"));
        }
        text
    }

    fn policy(&mut self, name: &str, action: &str) -> String {
        let (namespace, labels) = match self.0.usize(..5) {
            0 => ("web", "istio: edge".to_owned()),
            _ => ("shop", format!("version: {}", self.one(&VERSIONS))),
        };
        let dry_run = if self.chance(10) { ", annotations: {istio.io/dry-run: 'true'}" } else { "" };
        let rules: String = (0..self.0.usize(1..=3)).map(|_| self.policy_rule()).collect();
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
             metadata: {{name: {name}, namespace: {namespace}{dry_run}}}\n\
             spec:\n  selector: {{matchLabels: {{{labels}}}}}\n  action: {action}\n  rules:\n{rules}"
        )
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

    /// Returns a request. `addresses` are those of the servers.
    pub(crate) fn request(&mut self, addresses: &[String]) -> Request {
        let mut query = Vec::new();
        if self.chance(30) {
            query.push(format!("q={}", self.one(&VALUES)));
        }
        if self.chance(20) {
            query.push(format!("status={}", self.one(&["401", "503"])));
        }
        let mark = if query.is_empty() { "" } else { "?" };
        let path = if self.chance(15) { self.one(&ODD_PATHS) } else { self.one(&PATHS) };
        let path = format!("{path}{mark}{}", query.join("&"));
        let mut headers = Vec::new();
        if self.chance(60) {
            headers.push(format!("x-user: {}", self.one(&VALUES)));
        }
        if self.chance(30) {
            headers.push(format!("authorization: Bearer {}", self.one(&[GUEST, STAFF, "forged"]).trim()));
        }
        if self.chance(10) {
            headers
                .push(format!("x-forwarded-for: {}", self.one(&["203.0.113.7", "192.0.2.1, 203.0.113.7"])));
        }
        if self.chance(5) {
            headers.push("x-forwarded-proto: https".to_owned());
        }
        let request = match self.0.u32(..20) {
            0..=10 => Request { from: self.one(&CLIENTS), ..self.inner_request(&path, addresses) },
            _ => self.outer_request(&path),
        };
        let mut headers = if request.is_connection() { Vec::new() } else { headers };
        if request.from != "outside" && !request.is_connection() {
            self.inner_headers(&mut headers);
        }
        let is_preflight = headers.iter().any(|header| header.starts_with("access-control"));
        let method = if is_preflight { "OPTIONS" } else { request.method };
        Request { headers, method, ..request }
    }

    /// Adds headers that only clients in the mesh send.
    fn inner_headers(&mut self, headers: &mut Vec<String>) {
        if self.chance(8) {
            headers
                .push(format!("host: {}", self.one(&["s1.shop", "e1.ext", "unknown.example", "g1.shop:80"])));
        }
        if self.chance(8) {
            let origin = self.one(&["http://a.example", "http://b.example"]);
            headers.push(format!("origin: {origin}"));
            headers.push("access-control-request-method: GET".to_owned());
        }
    }

    /// Returns a request or a connection of a client in the mesh.
    fn inner_request(&mut self, path: &str, addresses: &[String]) -> Request {
        let service = |random: &mut Self, prefix: &str, count: usize, domain: &str| {
            format!("http://{prefix}{}.{domain}{path}", random.0.usize(..count))
        };
        let url = match self.0.u32(..13) {
            11 => format!("http://{}{path}", self.one(&["alias.shop", "h0.shop:8080", "h1.shop:8080"])),
            12 => format!("tcp://{}.shop:9000", self.one(&["h0", "h1"])),
            0..=3 => service(self, "s", SERVICES, "shop"),
            4 | 5 => service(self, "g", ROUTED_SERVICES, "shop"),
            6 => service(self, "e", ENTRIES, "ext"),
            7 => format!("http://{}:8080{path}", addresses[self.0.usize(..addresses.len())]),
            8 => format!("tcp://e{}.ext:9000", self.0.usize(..ENTRIES)),
            _ => format!("tcp://t{}.shop:9000", self.0.usize(..CONNECTION_SERVICES)),
        };
        let http2 = url.starts_with("http") && self.chance(15);
        let method = if url.starts_with("http") { self.one(&METHODS) } else { "GET" };
        Request { url, method, http2, ..Request::default() }
    }

    /// Returns a request or a connection from outside.
    fn outer_request(&mut self, path: &str) -> Request {
        let mut request = Request { from: "outside", ..Request::default() };
        request.url = match self.0.u32(..9) {
            0 | 1 => {
                let host = self.one(&["a.example", "b.example", "x.example", "c.other", "other"]);
                format!("http://{host}{path}")
            }
            2 | 3 => format!("http://{}{path}", self.one(&["ra.api", "rb.api", "x.api"])),
            4 => {
                let host = self.one(&["p.secure", "x.pass", "y.pass", "a.secure", "z.secure"]);
                format!("tls://{host}:443")
            }
            _ => {
                request.certificate = self.chance(70).then(|| self.one(&CLIENT_CERTIFICATES));
                let host = self.one(&["a.secure", "b.secure", "m.secure", "m.secure", "x.members"]);
                format!("https://{host}{path}")
            }
        };
        request
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
    /// The client uses HTTP/2.
    pub(crate) http2: bool,
}

impl Default for Request {
    fn default() -> Self {
        let (from, method, certificate) = ("", "GET", None);
        Self { from, url: String::new(), method, headers: Vec::new(), certificate, http2: false }
    }
}

impl Request {
    /// Returns the arguments that `call` and `explain` share.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let headers = self.headers.iter().flat_map(|header| ["-H".to_owned(), header.clone()]);
        let version = self.http2.then(|| "--http2".to_owned());
        ["-X".to_owned(), self.method.to_owned()].into_iter().chain(headers).chain(version).collect()
    }

    /// Returns whether this is a connection without a request.
    pub(crate) fn is_connection(&self) -> bool {
        self.url.starts_with("tcp:") || self.url.starts_with("tls:")
    }

    /// Returns the status with which the programs answer; `None` for 200.
    pub(crate) fn status(&self) -> Option<u64> {
        self.url.split_once("status=")?.1.parse().ok()
    }
}
