use std::{
    net::SocketAddr,
    rc::Rc,
    time::{Duration, SystemTime},
};

use super::*;
use crate::telemetry::collect;
use skysail_policy::{
    config::{
        Cluster, Endpoint,
        cluster::{Service, Workload},
    },
    error::Flags,
    peer::Certificate,
};

fn workload(name: &str) -> Arc<Workload> {
    Arc::new(Workload {
        name: format!("{name}-v1").into(),
        namespace: "default".into(),
        canonical_name: name.into(),
        canonical_revision: "v1".into(),
        cluster: "Kubernetes".into(),
        app: name.into(),
        version: "v1".into(),
    })
}

fn local() -> Arc<LocalWorkload> {
    Arc::new(LocalWorkload {
        workload: workload("productpage"),
        version: "1.32.0".into(),
        ..Default::default()
    })
}

fn cluster(name: &str, service: Option<&str>) -> Arc<Cluster> {
    let service = service.map(|name| Service {
        host: format!("{name}.default.svc.cluster.local").into(),
        name: name.into(),
        namespace: "default".into(),
    });
    Arc::new(Cluster { service, ..Cluster::new(name) })
}

fn endpoint(workload: Option<Arc<Workload>>) -> Arc<Endpoint> {
    let address = SocketAddr::from(([10, 0, 0, 1], 80));
    Arc::new(Endpoint { workload, ..Endpoint::new(address, None) })
}

fn mutual(account: &str, us: &str) -> Peer {
    let uri = |account: &str| format!("spiffe://cluster.local/ns/default/sa/{account}");
    let names = skysail_identity::Peer { uris: vec![uri(account)], ..Default::default() };
    Peer::secured(Some(Rc::new(Certificate::new(b"", names))), Some(uri(us).into()))
}

fn record(direction: Direction) -> Record<'static> {
    Record {
        status: 200,
        duration: Duration::from_millis(7),
        wire_received: 300,
        wire_sent: 2_600,
        ..Record::new(direction, SystemTime::UNIX_EPOCH)
    }
}

fn scrape(shard: &Shard) -> String {
    collect(vec![shard.snapshot()], &local(), None)
}

/// Returns the lines of one metric.
fn lines<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect()
}

#[test]
fn a_request_at_the_source() {
    let shard = Shard::new(local(), 1000);
    let head = RequestHead::build("GET", "/", "reviews:9080", &[]);
    let peer = mutual("bookinfo-reviews", "bookinfo-productpage");
    let cluster = cluster("outbound|9080|v1|reviews.default.svc.cluster.local", Some("reviews"));
    let endpoint = endpoint(Some(workload("reviews")));
    let record = Record {
        upstream: Some(&peer),
        cluster: Some(&cluster),
        endpoint: Some(&endpoint),
        ..record(Direction::Outbound)
    };
    shard.request(&record, &head);
    shard.request(&record, &head);
    assert_eq!(
        lines(&scrape(&shard), "istio_requests_total"),
        ["istio_requests_total{reporter=\"source\",source_workload=\"productpage-v1\",\
          source_canonical_service=\"productpage\",source_canonical_revision=\"v1\",\
          source_workload_namespace=\"default\",\
          source_principal=\"spiffe://cluster.local/ns/default/sa/bookinfo-productpage\",\
          source_app=\"productpage\",source_version=\"v1\",source_cluster=\"Kubernetes\",\
          destination_workload=\"reviews-v1\",destination_workload_namespace=\"default\",\
          destination_principal=\"spiffe://cluster.local/ns/default/sa/bookinfo-reviews\",\
          destination_app=\"reviews\",destination_version=\"v1\",\
          destination_service=\"reviews.default.svc.cluster.local\",\
          destination_canonical_service=\"reviews\",destination_canonical_revision=\"v1\",\
          destination_service_name=\"reviews\",destination_service_namespace=\"default\",\
          destination_cluster=\"Kubernetes\",request_protocol=\"http\",response_code=\"200\",\
          grpc_response_status=\"\",response_flags=\"-\",connection_security_policy=\"unknown\"} 2"]
    );
}

#[test]
fn a_request_at_the_destination_from_an_unknown_peer() {
    let shard = Shard::new(local(), 1000);
    let head = RequestHead::build("GET", "/", "made-up", &[]);
    let peer = Peer::plain();
    let record = Record { downstream: Some(&peer), flags: Flags::UF, ..record(Direction::Inbound) };
    shard.request(&record, &head);
    assert_eq!(
        lines(&scrape(&shard), "istio_requests_total"),
        ["istio_requests_total{reporter=\"destination\",source_workload=\"unknown\",\
          source_canonical_service=\"unknown\",source_canonical_revision=\"latest\",\
          source_workload_namespace=\"unknown\",source_principal=\"unknown\",source_app=\"unknown\",\
          source_version=\"unknown\",source_cluster=\"unknown\",destination_workload=\"productpage-v1\",\
          destination_workload_namespace=\"default\",destination_principal=\"unknown\",\
          destination_app=\"productpage\",destination_version=\"v1\",destination_service=\"productpage\",\
          destination_canonical_service=\"productpage\",destination_canonical_revision=\"v1\",\
          destination_service_name=\"productpage\",destination_service_namespace=\"default\",\
          destination_cluster=\"Kubernetes\",request_protocol=\"http\",response_code=\"200\",\
          grpc_response_status=\"\",response_flags=\"UF\",connection_security_policy=\"none\"} 1"]
    );
}

#[test]
fn later_metadata_applies_to_later_requests() {
    let shard = Shard::new(local(), 1000);
    let head = RequestHead::build("GET", "/", "h", &[]);
    let peer = mutual("reviews", "productpage");
    shard.request(&Record { downstream: Some(&peer), ..record(Direction::Inbound) }, &head);
    peer.set_workload(Some(workload("reviews")));
    shard.request(&Record { downstream: Some(&peer), ..record(Direction::Inbound) }, &head);
    let text = scrape(&shard);
    let found = lines(&text, "istio_requests_total");
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|line| line.contains("connection_security_policy=\"mutual_tls\"")));
    assert!(found.iter().any(|line| line.contains("source_workload=\"reviews-v1\"")));
}

#[test]
fn egress_requests_are_named_by_authority() {
    let shard = Shard::new(local(), 1000);
    let passthrough = cluster("PassthroughCluster", None);
    for authority in ["a.example", "b.example", "a.example"] {
        let head = RequestHead::build("GET", "/", authority, &[]);
        let record =
            Record { cluster: Some(&passthrough), route_name: "allow_any", ..record(Direction::Outbound) };
        shard.request(&record, &head);
    }
    let text = scrape(&shard);
    let found = lines(&text, "istio_requests_total");
    assert_eq!(found.len(), 2);
    assert!(found[0].contains("destination_service=\"a.example\"") && found[0].ends_with(" 2"));
    assert!(found[0].contains("destination_service_name=\"PassthroughCluster\""));
}

#[test]
fn histograms_have_envoys_shape() {
    let shard = Shard::new(local(), 1000);
    let head = RequestHead::build("GET", "/", "h", &[]);
    shard.request(&record(Direction::Outbound), &head);
    shard.request(&Record { duration: Duration::from_secs(4_000), ..record(Direction::Outbound) }, &head);
    let text = scrape(&shard);
    assert!(text.contains("# TYPE istio_request_duration_milliseconds histogram\n"));
    let buckets: Vec<_> = lines(&text, "istio_request_duration_milliseconds_bucket")
        .iter()
        .map(|line| line.split_once("le=\"").unwrap().1.replace("\"}", ""))
        .collect();
    let bounds = "0.5 0,1 0,5 0,10 1,25 1,50 1,100 1,250 1,500 1,1000 1,2500 1,5000 1,10000 1,30000 1,60000 1,\
                  300000 1,600000 1,1800000 1,3600000 1,+Inf 2";
    assert_eq!(buckets.join(","), bounds);
    assert!(lines(&text, "istio_request_duration_milliseconds_sum")[0].ends_with("} 4000007"));
    assert!(lines(&text, "istio_request_duration_milliseconds_count")[0].ends_with("} 2"));
    assert!(lines(&text, "istio_request_bytes_sum")[0].ends_with("} 600"));
    assert!(lines(&text, "istio_response_bytes_count")[0].ends_with("} 2"));
}

#[test]
fn connections_count_bytes_and_have_no_response_codes() {
    let shard = Shard::new(local(), 1000);
    let cluster = cluster("outbound|3306||mysql.default.svc.cluster.local", Some("mysql"));
    let record = Record { cluster: Some(&cluster), ..record(Direction::Outbound) };
    let stats = Stats::default();
    let counts = [(1, 0, 0, 0), (0, 0, 10, 20), (0, 0, 1, 2), (0, 1, 0, 0)];
    for (opened, closed, received, sent) in counts {
        shard.connection(&stats, &record, TcpCounts { opened, closed, sent, received });
    }
    let text = scrape(&shard);
    for (name, expected) in [
        ("istio_tcp_connections_opened_total", " 1"),
        ("istio_tcp_connections_closed_total", " 1"),
        ("istio_tcp_received_bytes_total", " 11"),
        ("istio_tcp_sent_bytes_total", " 22"),
    ] {
        let found = lines(&text, name);
        assert_eq!(found.len(), 1, "{name}");
        assert!(found[0].ends_with(expected), "{}", found[0]);
        assert!(found[0].contains(
            "request_protocol=\"tcp\",response_flags=\"-\",connection_security_policy=\"unknown\""
        ));
    }
}

#[test]
fn the_values_of_workers_are_summed() {
    let shards = [Shard::new(local(), 1000), Shard::new(local(), 1000)];
    let head = RequestHead::build("GET", "/", "h", &[]);
    let name: Arc<str> = "outbound|80||a".into();
    for shard in &shards {
        shard.request(&record(Direction::Outbound), &head);
        shard.cluster(&name).rq_total.inc();
    }
    // One worker opens the connection and another closes it: only the sum of the gauges is meaningful.
    shards[0].cluster(&name).cx_active.inc();
    shards[1].cluster(&name).cx_active.dec();
    let text = collect(shards.iter().map(Shard::snapshot).collect(), &local(), None);
    assert!(lines(&text, "istio_requests_total")[0].ends_with(" 2"));
    assert!(text.contains("envoy_cluster_upstream_rq_total{cluster_name=\"outbound|80||a\"} 2\n"));
    assert!(text.contains("envoy_cluster_upstream_cx_active{cluster_name=\"outbound|80||a\"} 0\n"));
    assert!(text.contains("istio_build{component=\"proxy\",tag=\"1.32.0\"} 1\n"));
}

#[test]
fn a_reused_address_of_a_cluster_name_is_not_mistaken() {
    let shard = Shard::new(local(), 1000);
    let head = RequestHead::build("GET", "/", "h", &[]);
    for round in 0..100 {
        let name = format!("s{round}");
        let cluster = cluster(&format!("outbound|80||{name}"), Some(&name));
        shard.request(&Record { cluster: Some(&cluster), ..record(Direction::Outbound) }, &head);
    }
    assert_eq!(lines(&scrape(&shard), "istio_requests_total").len(), 100);
}

/// Data that clients, servers and other sidecars choose.
#[test]
fn data_of_peers_does_not_grow_memory_without_bound() {
    let shard = Shard::new(local(), 1000);
    let passthrough = cluster("PassthroughCluster", None);
    for round in 0..20_000_u32 {
        let head = RequestHead::build("GET", &format!("/{round}"), &format!("h{round}"), &[]);
        // A client with a different name and certificate each time.
        let peer = mutual(&format!("p{round}"), "us");
        peer.set_workload(Some(workload(&format!("w{round}"))));
        shard.request(&Record { downstream: Some(&peer), ..record(Direction::Inbound) }, &head);
        // Different hosts and statuses.
        let status = 100 + u16::try_from(round % 900).unwrap();
        let record =
            Record { cluster: Some(&passthrough), status, grpc: true, ..record(Direction::Outbound) };
        shard.request(&Record { grpc_status: Some(round), ..record }, &head);
    }
    let numbers = shard.numbers.borrow();
    assert_eq!(numbers.http.series.len(), 1000);
    assert_eq!(numbers.dropped, 39_000);
    assert!(numbers.keys.len() <= MAX_KEYS && numbers.cluster_names.len() <= MAX_KEYS);
    assert!(numbers.peers.len() <= MAX_PEERS);
}

/// Labels of the maximum length that peers can choose.
#[test]
fn labels_that_peers_choose_use_a_bounded_number_of_bytes() {
    let shard = Shard::new(local(), 100);
    let bound = 100 * MAX_LABEL_BYTES;
    let head = RequestHead::build("GET", "/", "h", &[]);
    for round in 0..1000_u32 {
        let long: Arc<str> = format!("{round:06}{}", "x".repeat(250)).into();
        let [name, namespace, canonical_name, canonical_revision, cluster, app, version] =
            std::array::from_fn(|_| Arc::clone(&long));
        let workload =
            Workload { name, namespace, canonical_name, canonical_revision, cluster, app, version };
        let peer = Peer::plain();
        peer.set_workload(Some(Arc::new(workload)));
        let record = Record { downstream: Some(&peer), ..record(Direction::Inbound) };
        shard.request(&record, &head);
        shard.connection(&Stats::default(), &record, TcpCounts { opened: 1, ..TcpCounts::default() });
    }
    {
        let numbers = shard.numbers.borrow();
        assert!(numbers.http.bytes <= bound + bound / 16 && numbers.tcp.bytes <= bound + bound / 16);
        assert_eq!(
            numbers.http.bytes,
            numbers.http.series.iter().map(|(labels, _)| labels.len()).sum::<usize>()
        );
        assert_eq!(numbers.dropped, 0);
        assert!(numbers.unlabelled > 1000);
    }
    // No request is lost; a peer with too long metadata is unknown.
    let text = scrape(&shard);
    for name in ["istio_requests_total", "istio_tcp_connections_opened_total"] {
        let found = lines(&text, name);
        let count = |line: &&str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
        assert_eq!(found.iter().map(count).sum::<u64>(), 1000);
        let unknown = found.iter().find(|line| line.contains("source_workload=\"unknown\"")).unwrap();
        assert!(count(unknown) > 900, "{unknown}");
    }
    assert!(
        text.contains(&format!(
            "skysail_metric_peers_unlabelled_total{{}} {}\n",
            shard.snapshot().unlabelled
        ))
    );
    // The page comes in pieces, however long the labels are.
    let metrics = crate::telemetry::Metrics::new(vec![shard.snapshot()], &local(), None);
    let mut page = crate::telemetry::Page::new(crate::telemetry::plain::StatsFilter::default());
    while let Some(piece) = page.next(&metrics) {
        assert!(piece.len() < 128 << 10, "{} bytes", piece.len());
    }
    // Expired series make room.
    let snapshot = Snapshot::default();
    let now = Instant::now();
    shard.sweep(now, &snapshot);
    shard.sweep(now + 2 * EXPIRY, &snapshot);
    assert_eq!(shard.numbers.borrow().http.bytes, 0);
}

#[test]
fn invalid_names_and_statuses_create_no_series() {
    let shard = Shard::new(local(), 1000);
    for round in 0..10_u32 {
        let authority = format!("{}{round}", "a".repeat(300));
        let head = RequestHead::build("GET", "/", &authority, &[]);
        let record = Record { grpc: true, grpc_status: Some(17 + round), ..record(Direction::Outbound) };
        shard.request(&record, &head);
    }
    let text = scrape(&shard);
    let found = lines(&text, "istio_requests_total");
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("destination_service=\"unknown\"") && found[0].ends_with(" 10"));
    assert!(found[0].contains("grpc_response_status=\"2\""));
}

#[test]
fn series_without_updates_expire() {
    let shard = Shard::new(local(), 2);
    let head = RequestHead::build("GET", "/", "h", &[]);
    let from = |name: &str| {
        let peer = Peer::plain();
        peer.set_workload(Some(workload(name)));
        peer
    };
    let (one, two, three) = (from("one"), from("two"), from("three"));
    let request = |peer: &Peer| {
        shard.request(&Record { downstream: Some(peer), ..record(Direction::Inbound) }, &head);
    };
    let stats = Stats::default();
    let count = |opened, closed| {
        let counts = TcpCounts { opened, closed, ..TcpCounts::default() };
        shard.connection(&stats, &Record { downstream: Some(&one), ..record(Direction::Inbound) }, counts);
    };
    shard.expire_after(Some(Duration::from_secs(600)));
    let begin = Instant::now();
    let at = |seconds| begin + Duration::from_secs(seconds);
    let found = |name: &str| lines(&scrape(&shard), name).len();
    request(&one);
    request(&two);
    request(&three);
    count(1, 0);
    assert_eq!((found("istio_requests_total"), found("skysail_metric_series_dropped_total")), (2, 1));
    shard.sweep(at(0), &Snapshot::default());
    request(&one);
    shard.sweep(at(400), &Snapshot::default());
    assert_eq!(found("istio_requests_total"), 2);
    shard.sweep(at(700), &Snapshot::default());
    // Only one series was used since the beginning, and there is room for another.
    request(&three);
    let text = scrape(&shard);
    let left = lines(&text, "istio_requests_total");
    assert!(left.len() == 2 && left[0].contains("\"one-v1\"") && left[0].ends_with(" 2"), "{left:?}");
    assert!(left[1].contains("\"three-v1\"") && left[1].ends_with(" 1"), "{left:?}");
    // The idle connection's series expired together with that of the requests.
    assert!(text.contains("skysail_metric_series_expired_total{} 2\n"), "{text}");
    assert_eq!(found("istio_tcp_connections_opened_total"), 0);
    request(&one);
    assert!(lines(&scrape(&shard), "istio_requests_total")[0].ends_with(" 3"));
    // The end of the connection creates the series again, and does not keep it either.
    count(0, 1);
    assert_eq!(found("istio_tcp_connections_opened_total"), 1);
    shard.sweep(at(10_000), &Snapshot::default());
    shard.sweep(at(20_000), &Snapshot::default());
    assert_eq!((found("istio_requests_total"), found("istio_tcp_connections_opened_total")), (0, 0));
    shard.sweep(at(30_000), &Snapshot::default());
    shard.sweep(at(40_000), &Snapshot::default());
    assert_eq!(found("istio_tcp_connections_opened_total"), 0);
}

#[test]
fn metrics_have_their_configured_labels() {
    let expression = |text: &str| Some(Arc::new(Expression::compile(text).unwrap()));
    let changes = [
        // requests_total
        MetricOverride {
            metrics: 1,
            labels: vec![
                ("destination_service".into(), expression("request.host + '!'")),
                ("missing".into(), expression("request.headers['none']")),
                ("request_method".into(), expression("request.method")),
                ("source_principal".into(), None),
            ],
        },
        // response_bytes unchanged; all other metrics are dropped.
        MetricOverride { metrics: 8, labels: vec![] },
    ];
    let shard = Shard::new(local(), 1000);
    let record = record(Direction::Outbound);
    for method in ["GET", "PUT", "GET"] {
        let head = RequestHead::build(method, "/", "h", &[]);
        shard.request_changed(&changes, &Context { record: &record, request: Some(&head), response: None });
    }
    let text = scrape(&shard);
    let found = lines(&text, "istio_requests_total");
    assert_eq!(found.len(), 2);
    assert!(found[0].contains("destination_service=\"h!\"") && !found[0].contains("source_principal"));
    assert!(found[0].ends_with(",missing=\"unknown\",request_method=\"GET\"} 2"), "{}", found[0]);
    let found = lines(&text, "istio_response_bytes_count");
    assert!(found.len() == 1 && found[0].contains("source_principal") && found[0].ends_with(" 3"));
    assert!(!text.contains("istio_request_bytes") && !text.contains("istio_request_duration"));

    let change = |metrics, labels| MetricOverride { metrics, labels };
    let tcp = vec![change(0b1000, vec![("destination_service".into(), None)]), change(0b0100, vec![])];
    let stats = Stats { tcp, ..Stats::default() };
    shard.connection(&stats, &record, TcpCounts { opened: 1, closed: 1, sent: 1, received: 1 });
    let text = scrape(&shard);
    assert!(
        lines(&text, "istio_tcp_connections_opened_total")[0].contains("destination_service=\"unknown\"")
    );
    assert!(!lines(&text, "istio_tcp_connections_closed_total")[0].contains("destination_service=\""));
    assert!(!text.contains("istio_tcp_sent_bytes_total"));
}

#[test]
fn counters_of_removed_resources_are_removed() {
    let shard = Shard::new(local(), 10);
    let (kept, used, removed): (Arc<str>, Arc<str>, Arc<str>) = ("kept".into(), "used".into(), "gone".into());
    let mut snapshot = Snapshot::default();
    let clusters = Arc::make_mut(&mut snapshot.clusters);
    clusters.insert(Arc::clone(&kept), cluster("kept", None));
    let in_use = (shard.cluster(&used), shard.manager(&used), shard.listener(&used));
    for name in [&kept, &removed] {
        let _ = (shard.cluster(name), shard.outliers(name), shard.exports(name, "spans"));
        let _ = (shard.manager(name), shard.listener(name));
    }
    shard.sweep(Instant::now(), &snapshot);
    let text = scrape(&shard);
    assert!(!text.contains("\"gone\""), "{text}");
    assert!(text.contains("cluster_name=\"kept\"") && text.contains("cluster_name=\"kept\",what=\"spans\""));
    for label in ["cluster_name", "http_conn_manager_prefix", "listener_address"] {
        assert!(text.contains(&format!("{label}=\"used\"")), "{label}");
    }
    drop(in_use);
}
