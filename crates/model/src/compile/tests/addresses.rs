//! Addresses of hosts whose ServiceEntry has none.

use skysail_xds::istio::NameTable;

use super::*;

const ENTRY: &str = r#"
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: db, namespace: shop}
spec:
  hosts: [db.example.com, other.example.com]
  resolution: STATIC
  ports: [{number: 5432, name: tcp, protocol: TCP}]
  endpoints: [{address: 192.0.2.1}]
"#;

const STATUS: &str = "status: {addresses: [{value: 240.240.7.7, host: db.example.com}, {value: '2001:2::f0f0:707', host: db.example.com}]}\n";

/// Returns the addresses of a host in the name table, and whether each has a listener.
fn addresses(world: &World, view: &ProxyView, host: &str) -> Vec<(String, bool)> {
    let (made, _) = compile(world, view);
    let table: NameTable = get(&made, Kind::NameTable, "");
    let ips = table.table.get(host).map(|info| info.ips.clone()).unwrap_or_default();
    let has_listener = |ip: &String| made.get(Kind::Listener, &format!("{ip}_5432")).is_some();
    ips.into_iter().map(|ip| (ip.clone(), has_listener(&ip))).collect()
}

#[test]
fn clients_that_answer_dns_get_addresses_of_the_status_or_allocated_ones() {
    let dns = ProxyView { answers_dns: true, ..view() };
    let world = super::world(ENTRY);
    assert_eq!(addresses(&world, &view(), "db.example.com"), []);
    let [own, other] = ["db.example.com", "other.example.com"].map(|host| addresses(&world, &dns, host));
    assert_eq!((own.len(), other.len()), (1, 1), "{own:?} {other:?}");
    assert!(own[0].0.starts_with("240.240.") && own[0].1, "{own:?}");
    assert_ne!(own, other);
    // The same after a restart.
    assert_eq!(addresses(&super::world(ENTRY), &dns, "db.example.com"), own);

    let assigned = super::world(&format!("{ENTRY}{STATUS}"));
    assert_eq!(addresses(&assigned, &dns, "db.example.com"), [("240.240.7.7".to_owned(), true)]);
    assert_eq!(addresses(&assigned, &dns, "other.example.com"), other);
    let both = ProxyView { ipv6: true, ..dns };
    assert_eq!(addresses(&assigned, &both, "db.example.com").len(), 2);
    assert_eq!(addresses(&assigned, &view(), "db.example.com"), []);
}

#[test]
fn entries_may_decline_addresses() {
    let dns = ProxyView { answers_dns: true, ..view() };
    for (from, to) in [
        (
            "namespace: shop}",
            "namespace: shop, labels: {networking.istio.io/enable-autoallocate-ip: \"False\"}}",
        ),
        ("resolution: STATIC", "addresses: [10.9.9.0/24]\n  resolution: STATIC"),
        ("resolution: STATIC\n", "resolution: NONE\n"),
        ("db.example.com", "\"*.example.com\""),
    ] {
        let text = ENTRY
            .replace(from, to)
            .replace("  endpoints", if to.contains("NONE") { "  #" } else { "  endpoints" });
        let world = super::world(&format!("{text}{STATUS}"));
        let host = if to.contains('*') { "*.example.com" } else { "db.example.com" };
        assert_eq!(addresses(&world, &dns, host), [], "{to}");
    }
}

#[test]
fn blocks_of_one_network_have_one_filter_chain() {
    let entry = |name: &str, block: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{hosts: [{name}.example.com], addresses: ['{block}'], ports: [{{number: 5432, name: tcp, protocol: TCP}}]}}\n---\n"
        )
    };
    for (one, other, chains) in [
        ("10.1.2.3/16", "10.1.9.9/16", 1),
        ("10.1.2.3/16", "10.2.9.9/16", 2),
        ("1234:1f1:1::1/32", "1234:1f1:2::/32", 1),
        ("1234:1f1:1::1/48", "1234:1f1:2::/48", 2),
    ] {
        let world = super::world(&(entry("a", one) + &entry("b", other)));
        let (made, _) = compile(&world, &ProxyView { ipv6: true, ..view() });
        let everywhere: listener::Listener = get(&made, Kind::Listener, "0.0.0.0_5432");
        assert_eq!(everywhere.filter_chains.len(), chains, "{one} {other}");
    }
}
