//! Queries to DNS servers on loopback.

use hickory_proto::rr::{Record, rdata};
use skysail_testkit::{Dns, DnsAnswer};

use super::*;

fn servers(addresses: &[SocketAddr]) -> Servers {
    Servers { timeout: Duration::from_secs(2), attempts: 2, ..Servers::new(addresses) }
}

async fn lookup_at(dns: &Dns, name: &str, family: Family) -> Result<Answer, String> {
    // Long, because only the tests of silent servers wait for a timeout.
    let servers = Servers { timeout: Duration::from_secs(20), ..servers(&[dns.address()]) };
    lookup(&servers, &Metrics::default(), name, family).await.map_err(|error| error.to_string())
}

fn addresses(texts: &[&str], ttl: u64) -> Result<Answer, String> {
    let addresses = texts.iter().map(|text| text.parse().unwrap()).collect();
    Ok(Answer::Addresses(addresses, Duration::from_secs(ttl)))
}

fn no_addresses(nxdomain: bool, ttl: Option<u64>) -> Result<Answer, String> {
    Ok(Answer::NoAddresses { nxdomain, ttl: ttl.map(Duration::from_secs) })
}

#[tokio::test]
async fn answers_have_the_smallest_ttl_of_their_chain() {
    let dns = Dns::start();
    dns.set_addresses("a.example", &["10.0.0.2", "10.0.0.1", "fd00::1"], 7);
    dns.set_answer("alias.example", DnsAnswer::Alias("a.example".into(), 3));
    dns.set_answer("round.example", DnsAnswer::Alias("nowhere.example".into(), 3));
    dns.set_answer("empty.example", DnsAnswer::NoAddresses(Some(11)));
    dns.set_answer("curt.example", DnsAnswer::NoAddresses(None));
    dns.set_answer("broken.example", DnsAnswer::Error(ResponseCode::ServFail));
    let v4 = async |name| lookup_at(&dns, name, Family::V4).await;
    assert_eq!(v4("a.example").await, addresses(&["10.0.0.2", "10.0.0.1"], 7));
    assert_eq!(lookup_at(&dns, "a.example", Family::V6).await, addresses(&["fd00::1"], 7));
    assert_eq!(v4("alias.example").await, addresses(&["10.0.0.2", "10.0.0.1"], 3));
    // The last name of the chain does not exist; the TTL of the alias is shorter than that of the SOA record.
    assert_eq!(v4("round.example").await, no_addresses(true, Some(3)));
    assert_eq!(v4("nowhere.example").await, no_addresses(true, Some(30)));
    assert_eq!(v4("empty.example").await, no_addresses(false, Some(11)));
    assert_eq!(v4("curt.example").await, no_addresses(false, None));
    let error = v4("broken.example").await.unwrap_err();
    assert!(error.contains("Server Failure") && error.contains(&dns.address().to_string()), "{error}");
}

#[tokio::test]
async fn truncated_answers_are_queried_by_tcp() {
    let dns = Dns::start();
    let many: Vec<String> = (0..100).map(|last| format!("10.0.0.{last}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    dns.set_addresses("a.example", &many, 5);
    assert_eq!(lookup_at(&dns, "a.example", Family::V4).await, addresses(&many, 5));
    assert_eq!(dns.queries(), (1, 1));
}

#[tokio::test]
async fn all_servers_are_queried_twice() {
    let (silent, good) = (Dns::start(), Dns::start());
    silent.set_answer("a.example", DnsAnswer::Silent);
    good.set_addresses("a.example", &["10.0.0.1"], 5);
    let metrics = Metrics::default();
    let both = servers(&[silent.address(), good.address()]);
    let answer = lookup(&both, &metrics, "a.example", Family::V4).await.map_err(|error| error.to_string());
    assert_eq!(answer, addresses(&["10.0.0.1"], 5));
    let error = lookup(&servers(&[silent.address()]), &metrics, "a.example", Family::V4).await.unwrap_err();
    assert!(error.contains("does not answer within"), "{error}");
    assert_eq!((silent.queries().0, good.queries().0), (3, 1));
}

#[tokio::test]
async fn the_server_that_answered_last_is_queried_first() {
    let (silent, good) = (Dns::start(), Dns::start());
    silent.set_answer("a.example", DnsAnswer::Silent);
    good.set_addresses("a.example", &["10.0.0.1"], 5);
    let both = servers(&[silent.address(), good.address()]);
    for _ in 0..5 {
        lookup(&both, &Metrics::default(), "a.example", Family::V4).await.unwrap();
    }
    assert_eq!((silent.queries().0, good.queries().0), (1, 5));
    // If that server fails, the first is queried again.
    good.set_answer("a.example", DnsAnswer::Silent);
    silent.set_addresses("a.example", &["10.0.0.2"], 5);
    let answer = lookup(&both, &Metrics::default(), "a.example", Family::V4).await;
    assert_eq!(answer.map_err(|error| error.to_string()), addresses(&["10.0.0.2"], 5));
}

/// Returns a response with these records, modified by `change`.
fn reply_to(request: &[u8], records: &[Record], change: impl FnOnce(&mut Message)) -> Vec<u8> {
    let request = Message::from_vec(request).unwrap();
    let mut reply = Message::response(request.metadata.id, OpCode::Query);
    reply.add_queries(request.queries);
    reply.add_answers(records.iter().cloned());
    change(&mut reply);
    reply.to_vec().unwrap()
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

fn a(owner: &str, ttl: u32, ip: [u8; 4]) -> Record {
    Record::from_rdata(name(owner), ttl, RData::A(rdata::A(ip.into())))
}

fn cname(owner: &str, ttl: u32, target: &str) -> Record {
    Record::from_rdata(name(owner), ttl, RData::CNAME(rdata::CNAME(name(target))))
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&u16::try_from(message.len()).unwrap().to_be_bytes(), message].concat()
}

async fn lookup_at_raw(address: SocketAddr, name: &str) -> Result<Answer, String> {
    let servers = Servers { timeout: Duration::from_secs(20), attempts: 1, ..servers(&[address]) };
    lookup(&servers, &Metrics::default(), name, Family::V4).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_message_may_be_truncated_at_any_byte() {
    let good = |request: &[u8]| framed(&reply_to(request, &[a("a.example.", 5, [10, 0, 0, 1])], |_| {}));
    for cut in [12, 20, 40] {
        let short = move |request: &[u8]| {
            let whole = reply_to(request, &[a("a.example.", 5, [6; 4])], |reply| {
                reply.metadata.truncation = true;
            });
            vec![whole[..cut].to_vec()]
        };
        let address = Dns::start_raw(short, good);
        assert_eq!(
            lookup_at_raw(address, "a.example").await,
            addresses(&["10.0.0.1"], 5),
            "after {cut} bytes"
        );
    }
}

#[tokio::test]
async fn an_answer_by_tcp_may_have_thousands_of_addresses() {
    let many: Vec<_> = (0..2_500u16).map(|n| a("a.example.", 5, [10, 1, (n >> 8) as u8, n as u8])).collect();
    let cut = |request: &[u8]| vec![reply_to(request, &[], |reply| reply.metadata.truncation = true)];
    let address = Dns::start_raw(cut, move |request| framed(&reply_to(request, &many, |_| {})));
    let Ok(Answer::Addresses(addresses, _)) = lookup_at_raw(address, "a.example").await else { panic!() };
    assert_eq!(addresses.len(), 2_500);
}

#[tokio::test]
async fn invalid_answers_by_tcp_are_errors() {
    for broken in [&b""[..], b"\x00", b"\x00\x00", b"\xff\xffx", b"\x00\x05hello"] {
        let cut = |request: &[u8]| vec![reply_to(request, &[], |reply| reply.metadata.truncation = true)];
        let address = Dns::start_raw(cut, |_| broken.to_vec());
        let error = lookup_at_raw(address, "a.example").await.unwrap_err();
        assert!(error.starts_with(&address.to_string()), "{broken:?}: {error}");
    }
}

#[tokio::test]
async fn an_error_response_need_not_repeat_the_question() {
    let refuse = |request: &[u8]| {
        vec![reply_to(request, &[], |reply| {
            reply.queries.clear();
            reply.metadata.response_code = ResponseCode::FormErr;
        })]
    };
    let error = lookup_at_raw(Dns::start_raw(refuse, |_| Vec::new()), "a.example").await.unwrap_err();
    assert!(error.contains("Form Error"), "{error}");
}

#[tokio::test]
async fn an_alias_without_target_records_is_looked_up_again() {
    // CoreDNS answers like this when the upstream server of the target does not answer.
    let partial = |request: &[u8]| {
        let name_in_query = Message::from_vec(request).unwrap().queries[0].name().to_ascii();
        vec![match &*name_in_query {
            "a.example." => reply_to(request, &[cname("a.example.", 7, "b.example.")], |_| {}),
            "b.example." => reply_to(request, &[a("b.example.", 9, [10, 0, 0, 1])], |_| {}),
            "c.example." => reply_to(request, &[cname("c.example.", 7, "broken.example.")], |_| {}),
            _ => reply_to(request, &[], |reply| reply.metadata.response_code = ResponseCode::ServFail),
        }]
    };
    let address = Dns::start_raw(partial, |_| Vec::new());
    assert_eq!(lookup_at_raw(address, "a.example").await, addresses(&["10.0.0.1"], 7));
    let error = lookup_at_raw(address, "c.example").await.unwrap_err();
    assert!(error.contains("Server Failure"), "{error}");
}

#[tokio::test]
async fn cname_loops_are_errors() {
    for records in [
        vec![cname("a.example.", 7, "a.example.")],
        vec![cname("a.example.", 7, "b.example."), cname("b.example.", 7, "a.example.")],
        (0..40).map(|n| cname(&format!("{n}.example."), 7, &format!("{}.example.", n + 1))).collect(),
    ] {
        let first = records[0].name.to_ascii().trim_end_matches('.').to_owned();
        let cname_loop = move |request: &[u8]| vec![reply_to(request, &records, |_| {})];
        let error = lookup_at_raw(Dns::start_raw(cname_loop, |_| Vec::new()), &first).await.unwrap_err();
        assert!(error.contains("form a loop"), "{error}");
    }
    // The same with one record per response.
    let one = |request: &[u8]| {
        let name_in_query = Message::from_vec(request).unwrap().queries[0].name().to_ascii();
        vec![reply_to(
            request,
            &[cname(&name_in_query, 7, &format!("{}.example.", name_in_query.len() % 2))],
            |_| {},
        )]
    };
    let error = lookup_at_raw(Dns::start_raw(one, |_| Vec::new()), "a.example").await.unwrap_err();
    assert!(error.contains("form a loop"), "{error}");
}

#[tokio::test]
async fn names_ignore_case_and_invalid_ttls_count_as_zero() {
    let of = |records: Vec<Record>| {
        Dns::start_raw(move |request| vec![reply_to(request, &records, |_| {})], |_| Vec::new())
    };
    let mixed_case = vec![cname("A.EXAMPLE.", 9, "B.Example."), a("b.exAMPLE.", 8, [10, 0, 0, 1])];
    assert_eq!(lookup_at_raw(of(mixed_case), "a.example").await, addresses(&["10.0.0.1"], 8));
    for (ttls, expected) in [([0, 5], 0), ([5, 7], 5), ([1 << 31, 5], 0), ([u32::MAX, u32::MAX], 0)] {
        let records = vec![a("a.example.", ttls[0], [10, 0, 0, 1]), a("a.example.", ttls[1], [10, 0, 0, 2])];
        let address = of(records);
        assert_eq!(
            lookup_at_raw(address, "a.example").await,
            addresses(&["10.0.0.1", "10.0.0.2"], expected),
            "{ttls:?}"
        );
    }
    let longest = vec![a("a.example.", i32::MAX as u32, [10, 0, 0, 1])];
    assert_eq!(lookup_at_raw(of(longest), "a.example").await, addresses(&["10.0.0.1"], i32::MAX as u64));
    // The longest name, and one octet more.
    let longest = ["x".repeat(63), "x".repeat(63), "x".repeat(63), "x".repeat(61)].join(".");
    let address = of(Vec::new());
    assert_eq!(lookup_at_raw(address, &longest).await, no_addresses(false, None));
    assert!(lookup_at_raw(address, &format!("{longest}x")).await.is_err());
}

#[tokio::test]
async fn messages_that_do_not_answer_the_query_are_ignored() {
    let messages = |request: &[u8]| {
        let id = Message::from_vec(request).unwrap().metadata.id;
        let reply = |id: u16, owner: &str, ip: [u8; 4]| {
            let mut reply = Message::response(id, OpCode::Query);
            reply.add_query(Query::query(name(owner), RecordType::A));
            reply.add_answer(a(owner, 5, ip));
            reply.to_vec().unwrap()
        };
        vec![
            b"x".to_vec(),
            reply(id ^ 1, "a.example.", [6; 4]),
            reply(id, "b.example.", [6; 4]),
            request.to_vec(),
            reply(id, "a.example.", [10, 0, 0, 1]),
        ]
    };
    let address = Dns::start_raw(messages, |_| Vec::new());
    assert_eq!(lookup_at_raw(address, "a.example").await, addresses(&["10.0.0.1"], 5));
}
