//! Times of the decisions about a request, by the size of the configuration. `skysail bench micro` compares them with a
//! baseline.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panic")]

#[path = "../../../benchmarks/micro.rs"]
mod settings;

use std::{
    hint::black_box,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use criterion::{BenchmarkId, Criterion};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::json;
use skysail_http::head::RequestHead;
use skysail_policy::{
    balance::{self, PickOptions, PickState},
    config::{
        Cluster, Endpoint, Endpoints, RouteTable,
        cluster::Balancer,
        jwt::{Jwt, JwtProvider, KeySet, Keys, Requirement, Source},
        policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
        route::{Action, DirectResponse, HeaderOps, PathMatch, Route, RouteMatch, VirtualHost},
        text::TextMatch,
    },
    jwt::{self, JwtOutcome, Signatures},
    peer::{Certificate, Peer},
    rbac::{self, Subject, Tally, Verdict},
    route,
};

/// Client of the requests.
const CALLER: &str = "spiffe://cluster.local/ns/default/sa/productpage";
/// Path of the requests.
const PATH: &str = "/api/v1/products/42?limit=20";
/// Time of the requests, in seconds since the Unix epoch.
const NOW: u64 = 1_800_000_000;

fn main() {
    let mut criterion = settings::criterion();
    check_rbac(&mut criterion);
    find_route(&mut criterion);
    check_jwt(&mut criterion);
    pick(&mut criterion);
    criterion.final_summary();
}

/// Evaluates rules for callers and paths, of which the last one allows the request.
fn check_rbac(criterion: &mut Criterion) {
    let names = skysail_identity::Peer { uris: vec![CALLER.to_owned()], ..Default::default() };
    let peer = Peer::secured(Some(Rc::new(Certificate::new(b"", names))), None);
    let head = RequestHead::build("GET", PATH, "reviews:9080", &[]);
    let subject = Subject {
        head: Some(&head),
        peer: &peer,
        source: SocketAddr::from(([10, 0, 0, 1], 5_000)),
        remote: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
        destination: SocketAddr::from(([10, 0, 0, 2], 9_080)),
        server_name: None,
        metadata: None,
    };
    let mut group = criterion.benchmark_group("policy/check_rbac");
    for rules in [10, 100, 1_000] {
        let policies = [access_policy(rules)];
        group.bench_with_input(BenchmarkId::from_parameter(rules), &policies, |bencher, policies| {
            bencher.iter(|| {
                let verdict = rbac::check(black_box(policies), &subject, &mut Tally::default());
                assert_eq!(verdict, Verdict::Allow);
            });
        });
    }
}

fn access_policy(rules: usize) -> Arc<Policy> {
    let rule = |number: usize| {
        let caller = if number + 1 == rules {
            CALLER.to_owned()
        } else {
            format!("spiffe://cluster.local/ns/team-{number}/sa/default")
        };
        Rule {
            name: format!("ns[default]-policy[reviews-{number}]-rule[0]").into(),
            permissions: vec![Permission::Path(TextMatch::Prefix((*b"/api/").into()))],
            principals: vec![Principal::Authenticated(Some(TextMatch::Exact(caller.as_bytes().into())))],
        }
    };
    let rules = Rules::new(RuleAction::Allow, (0..rules).map(rule).collect());
    Arc::new(Policy { rules: Some(rules), shadow: None, shadow_prefix: "".into() })
}

/// Selects the route of a request by its authority, in a table of a mesh with this number of hosts.
fn find_route(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("policy/find_route");
    for hosts in [100, 10_000] {
        let (table, mut rng) = (route_table(hosts), fastrand::Rng::with_seed(1));
        let authority = format!("svc-{}.default.svc.cluster.local:9080", hosts / 2);
        let head = RequestHead::build("GET", PATH, &authority, &[]);
        group.bench_with_input(BenchmarkId::from_parameter(hosts), &table, |bencher, table| {
            bencher.iter(|| {
                let found = route::find(black_box(table), &head, None, &mut rng).unwrap();
                assert!(found.exact);
            });
        });
    }
}

/// Returns a table with the domains of services in each virtual host, and a catch-all.
fn route_table(hosts: usize) -> RouteTable {
    let mut table = RouteTable::default();
    for number in 0..hosts {
        let name = format!("svc-{number}.default");
        table.hosts.push(virtual_host(&name));
        for domain in [name.clone(), format!("{name}.svc"), format!("{name}.svc.cluster.local")] {
            assert!(table.put(&domain, number) && table.put(&format!("{domain}:9080"), number));
        }
    }
    table.hosts.push(virtual_host("allow_any"));
    assert!(table.put("*", hosts));
    table
}

/// Returns a host with three routes, of which the last one matches every path.
fn virtual_host(name: &str) -> Arc<VirtualHost> {
    let route = |path: PathMatch| Route {
        name: name.into(),
        matches: RouteMatch {
            path,
            case_sensitive: true,
            headers: Vec::new(),
            query: Vec::new(),
            metadata: Box::default(),
            grpc: false,
            fraction: None,
        },
        action: Action::Direct(DirectResponse { status: 200, body: Box::default() }),
        headers: HeaderOps::default(),
        filters: Vec::new(),
        metadata: None,
        decorator: None,
        tracing: None,
        stat_prefix: None,
    };
    let paths = [
        PathMatch::Exact((*b"/healthz").into()),
        PathMatch::SeparatedPrefix((*b"/api/v2").into()),
        PathMatch::Prefix((*b"/").into()),
    ];
    Arc::new(VirtualHost {
        name: name.into(),
        routes: paths.map(route).into(),
        headers: HeaderOps::default(),
        include_attempt_count: false,
        require_tls: false,
        limits: Vec::new(),
        used: Arc::default(),
    })
}

/// Checks a token that the worker has verified before, and one that it sees for the first time.
fn check_jwt(criterion: &mut Criterion) {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let jwt = jwt_filter(&pair);
    let claims = json!({
        "iss": "https://issuer.example", "aud": "shop", "sub": "user-42", "exp": NOW + 3_600, "iat": NOW,
        "scope": "orders:read orders:write", "groups": ["staff", "reviewers"],
    });
    let mut header = Header::new(Algorithm::ES256);
    header.kid = Some("key-1".to_owned());
    let key = EncodingKey::from_ec_der(pair.serialized_der());
    let token = jsonwebtoken::encode(&header, &claims, &key).unwrap();
    let head = RequestHead::build("GET", PATH, "reviews", &[("authorization", &format!("Bearer {token}"))]);
    let requirement = Requirement::Provider(0, None);
    let is_valid =
        |outcome: &JwtOutcome<'_>| matches!(outcome, JwtOutcome::Pass(tokens) if tokens.len() == 1);

    criterion.bench_function("policy/check_jwt/seen", |bencher| {
        bencher.iter(|| {
            let outcome = jwt::check(&jwt, &requirement, black_box(&head), NOW, (&[], &[]));
            assert!(is_valid(&outcome));
        });
    });
    criterion.bench_function("policy/check_jwt/unseen", |bencher| {
        bencher.iter(|| {
            // Signatures of another request, none of which is this token's.
            let known = Signatures::default();
            let outcome = jwt::check_again(&jwt, &requirement, black_box(&head), NOW, &known);
            assert!(is_valid(&outcome));
        });
    });
}

fn jwt_filter(pair: &KeyPair) -> Jwt {
    // The first byte says that the point is not compressed.
    let (x, y) = pair.public_key_raw()[1..].split_at(32);
    let [x, y] = [x, y].map(|half| BASE64_URL_SAFE_NO_PAD.encode(half));
    let key = json!({"kty": "EC", "crv": "P-256", "kid": "key-1", "x": x, "y": y});
    let keys = KeySet::parse(json!({ "keys": [key] }).to_string().as_bytes()).unwrap();
    let provider = JwtProvider {
        name: "origins-0".into(),
        issuer: Some("https://issuer.example".into()),
        audiences: vec!["shop".into()],
        keys: Keys::Local(Arc::new(keys)),
        forward: true,
        from: vec![Source::Header("authorization".into(), "Bearer ".into())],
        payload_in_metadata: Some("https://issuer.example".into()),
        header_in_metadata: None,
        spaced_claims: vec!["scope".into()],
        payload_header: None,
        pad_payload_header: false,
        claim_headers: Vec::new(),
        clock_skew: Duration::from_secs(60),
        clear_route: false,
    };
    Jwt {
        fingerprint: 1,
        providers: vec![provider],
        rules: Vec::new(),
        named: Vec::new(),
        bypass_preflight: false,
    }
}

/// Selects one of this number of endpoints, by the fewest requests among two.
fn pick(criterion: &mut Criterion) {
    let balancer = Balancer::LeastRequest { choices: 2, bias: 1.0 };
    let cluster = Cluster { balancer, ..Cluster::new("outbound|9080||reviews.default.svc.cluster.local") };
    let mut group = criterion.benchmark_group("policy/pick_endpoint");
    for count in [10_u16, 1_000] {
        let endpoint = |number: u16| {
            let [high, low] = number.to_be_bytes();
            Arc::new(Endpoint::new(SocketAddr::from(([10, 0, high, low], 9_080)), None))
        };
        let endpoints = Arc::new(Endpoints::of((0..count).map(endpoint).collect()));
        let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(1));
        let load = |endpoint: &Endpoint| u64::from(endpoint.address.port());
        group.bench_with_input(BenchmarkId::from_parameter(count), &endpoints, |bencher, endpoints| {
            bencher.iter(|| {
                let options = PickOptions::default();
                let picked =
                    balance::pick(&cluster, black_box(endpoints), &mut state, load, options, &mut rng);
                assert!(picked.is_some());
            });
        });
    }
}
