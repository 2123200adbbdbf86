//! Questions to a real server, over real sockets.

use hickory_proto::rr::{Record, rdata};
use skysail_testkit::{Dns, Say};

use super::*;

fn servers(addresses: &[SocketAddr]) -> Servers {
    Servers { timeout: Duration::from_millis(200), attempts: 2, ..Servers::new(addresses) }
}

async fn asked(dns: &Dns, name: &str, family: Family) -> Result<Answer, String> {
    // Nobody waits for silence here but the tests of it.
    let patient = Servers { timeout: Duration::from_secs(20), ..servers(&[dns.address()]) };
    ask(&patient, &Metrics::default(), name, family).await.map_err(|error| error.to_string())
}

fn found(texts: &[&str], ttl: u64) -> Result<Answer, String> {
    let addresses = texts.iter().map(|text| text.parse().unwrap()).collect();
    Ok(Answer::Addresses(addresses, Duration::from_secs(ttl)))
}

fn nothing(missing: bool, ttl: Option<u64>) -> Result<Answer, String> {
    Ok(Answer::Nothing { missing, ttl: ttl.map(Duration::from_secs) })
}

#[tokio::test]
async fn answers_are_read_with_how_long_they_hold() {
    let dns = Dns::start();
    dns.addresses("a.example", &["10.0.0.2", "10.0.0.1", "fd00::1"], 7);
    dns.say("alias.example", Say::Alias("a.example".into(), 3));
    dns.say("round.example", Say::Alias("nowhere.example".into(), 3));
    dns.say("empty.example", Say::Nothing(Some(11)));
    dns.say("curt.example", Say::Nothing(None));
    dns.say("broken.example", Say::Code(ResponseCode::ServFail));
    let v4 = async |name| asked(&dns, name, Family::V4).await;
    assert_eq!(v4("a.example").await, found(&["10.0.0.2", "10.0.0.1"], 7));
    assert_eq!(asked(&dns, "a.example", Family::V6).await, found(&["fd00::1"], 7));
    assert_eq!(v4("alias.example").await, found(&["10.0.0.2", "10.0.0.1"], 3));
    // The last name of the chain does not exist, and the alias holds for a shorter time than that.
    assert_eq!(v4("round.example").await, nothing(true, Some(3)));
    assert_eq!(v4("nowhere.example").await, nothing(true, Some(30)));
    assert_eq!(v4("empty.example").await, nothing(false, Some(11)));
    assert_eq!(v4("curt.example").await, nothing(false, None));
    let error = v4("broken.example").await.unwrap_err();
    assert!(error.contains("Server Failure") && error.contains(&dns.address().to_string()), "{error}");
}

#[tokio::test]
async fn long_answers_come_by_tcp() {
    let dns = Dns::start();
    let many: Vec<String> = (0..100).map(|last| format!("10.0.0.{last}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    dns.addresses("a.example", &many, 5);
    assert_eq!(asked(&dns, "a.example", Family::V4).await, found(&many, 5));
    assert_eq!(dns.questions(), (1, 1));
}

#[tokio::test]
async fn servers_are_asked_in_turn_and_more_than_once() {
    let (silent, good) = (Dns::start(), Dns::start());
    silent.say("a.example", Say::Silence);
    good.addresses("a.example", &["10.0.0.1"], 5);
    let metrics = Metrics::default();
    let both = servers(&[silent.address(), good.address()]);
    let answer = ask(&both, &metrics, "a.example", Family::V4).await.map_err(|error| error.to_string());
    assert_eq!(answer, found(&["10.0.0.1"], 5));
    let error = ask(&servers(&[silent.address()]), &metrics, "a.example", Family::V4).await.unwrap_err();
    assert!(error.contains("does not answer within"), "{error}");
    assert_eq!((silent.questions().0, good.questions().0), (3, 1));
}

#[tokio::test]
async fn a_dead_server_costs_its_time_once() {
    let (silent, good) = (Dns::start(), Dns::start());
    silent.say("a.example", Say::Silence);
    good.addresses("a.example", &["10.0.0.1"], 5);
    let both = servers(&[silent.address(), good.address()]);
    for _ in 0..5 {
        ask(&both, &Metrics::default(), "a.example", Family::V4).await.unwrap();
    }
    assert_eq!((silent.questions().0, good.questions().0), (1, 5));
    // And if the other one dies, the first is tried again.
    good.say("a.example", Say::Silence);
    silent.addresses("a.example", &["10.0.0.2"], 5);
    let answer = ask(&both, &Metrics::default(), "a.example", Family::V4).await;
    assert_eq!(answer.map_err(|error| error.to_string()), found(&["10.0.0.2"], 5));
}

/// A server that sends these bytes for each question it gets by UDP, and closes what comes by TCP unless it answers
/// that.
async fn raw(
    udp: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static,
    tcp: impl Fn(&[u8]) -> Vec<u8> + Send + 'static,
) -> SocketAddr {
    let (listener, socket) = loop {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        if let Ok(socket) = UdpSocket::bind(listener.local_addr().unwrap()).await {
            break (listener, socket);
        }
    };
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 512];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            for message in udp(&buffer[..length]) {
                socket.send_to(&message, from).await.unwrap();
            }
        }
    });
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut bytes).await.unwrap();
            let _ = stream.write_all(&tcp(&bytes)).await;
        }
    });
    address
}

/// A reply with these records, and what else `change` does to it.
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

async fn asked_raw(address: SocketAddr, name: &str) -> Result<Answer, String> {
    let patient = Servers { timeout: Duration::from_secs(20), attempts: 1, ..servers(&[address]) };
    ask(&patient, &Metrics::default(), name, Family::V4).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_message_may_be_cut_anywhere() {
    let good = |request: &[u8]| framed(&reply_to(request, &[a("a.example.", 5, [10, 0, 0, 1])], |_| {}));
    for cut in [12, 20, 40] {
        let short = move |request: &[u8]| {
            let whole = reply_to(request, &[a("a.example.", 5, [6; 4])], |reply| {
                reply.metadata.truncation = true;
            });
            vec![whole[..cut].to_vec()]
        };
        let address = raw(short, good).await;
        assert_eq!(asked_raw(address, "a.example").await, found(&["10.0.0.1"], 5), "after {cut} bytes");
    }
}

#[tokio::test]
async fn thousands_of_addresses_are_one_answer() {
    let many: Vec<_> = (0..2_500u16).map(|n| a("a.example.", 5, [10, 1, (n >> 8) as u8, n as u8])).collect();
    let cut = |request: &[u8]| vec![reply_to(request, &[], |reply| reply.metadata.truncation = true)];
    let address = raw(cut, move |request| framed(&reply_to(request, &many, |_| {}))).await;
    let Ok(Answer::Addresses(addresses, _)) = asked_raw(address, "a.example").await else { panic!() };
    assert_eq!(addresses.len(), 2_500);
}

#[tokio::test]
async fn broken_answers_by_tcp_are_failures() {
    for broken in [&b""[..], b"\x00", b"\x00\x00", b"\xff\xffx", b"\x00\x05hello"] {
        let cut = |request: &[u8]| vec![reply_to(request, &[], |reply| reply.metadata.truncation = true)];
        let address = raw(cut, |_| broken.to_vec()).await;
        let error = asked_raw(address, "a.example").await.unwrap_err();
        assert!(error.starts_with(&address.to_string()), "{broken:?}: {error}");
    }
}

#[tokio::test]
async fn who_refuses_need_not_repeat_the_question() {
    let refuse = |request: &[u8]| {
        vec![reply_to(request, &[], |reply| {
            reply.queries.clear();
            reply.metadata.response_code = ResponseCode::FormErr;
        })]
    };
    let error = asked_raw(raw(refuse, |_| Vec::new()).await, "a.example").await.unwrap_err();
    assert!(error.contains("Form Error"), "{error}");
}

#[tokio::test]
async fn an_alias_is_followed_where_the_answer_ends_with_it() {
    // As CoreDNS does when the server it asks about the other name does not answer.
    let partial = |request: &[u8]| {
        let asked = Message::from_vec(request).unwrap().queries[0].name().to_ascii();
        vec![match &*asked {
            "a.example." => reply_to(request, &[cname("a.example.", 7, "b.example.")], |_| {}),
            "b.example." => reply_to(request, &[a("b.example.", 9, [10, 0, 0, 1])], |_| {}),
            "c.example." => reply_to(request, &[cname("c.example.", 7, "broken.example.")], |_| {}),
            _ => reply_to(request, &[], |reply| reply.metadata.response_code = ResponseCode::ServFail),
        }]
    };
    let address = raw(partial, |_| Vec::new()).await;
    assert_eq!(asked_raw(address, "a.example").await, found(&["10.0.0.1"], 7));
    let error = asked_raw(address, "c.example").await.unwrap_err();
    assert!(error.contains("Server Failure"), "{error}");
}

#[tokio::test]
async fn names_that_go_round_in_a_circle_are_failures() {
    for records in [
        vec![cname("a.example.", 7, "a.example.")],
        vec![cname("a.example.", 7, "b.example."), cname("b.example.", 7, "a.example.")],
        (0..40).map(|n| cname(&format!("{n}.example."), 7, &format!("{}.example.", n + 1))).collect(),
    ] {
        let first = records[0].name.to_ascii().trim_end_matches('.').to_owned();
        let circle = move |request: &[u8]| vec![reply_to(request, &records, |_| {})];
        let error = asked_raw(raw(circle, |_| Vec::new()).await, &first).await.unwrap_err();
        assert!(error.contains("without end"), "{error}");
    }
    // The same, one name at a time.
    let one = |request: &[u8]| {
        let asked = Message::from_vec(request).unwrap().queries[0].name().to_ascii();
        vec![reply_to(request, &[cname(&asked, 7, &format!("{}.example.", asked.len() % 2))], |_| {})]
    };
    let error = asked_raw(raw(one, |_| Vec::new()).await, "a.example").await.unwrap_err();
    assert!(error.contains("without end"), "{error}");
}

#[tokio::test]
async fn capitals_and_odd_lifetimes_are_read() {
    let of =
        |records: Vec<Record>| raw(move |request| vec![reply_to(request, &records, |_| {})], |_| Vec::new());
    let loud = vec![cname("A.EXAMPLE.", 9, "B.Example."), a("b.exAMPLE.", 8, [10, 0, 0, 1])];
    assert_eq!(asked_raw(of(loud).await, "a.example").await, found(&["10.0.0.1"], 8));
    for (ttls, kept) in [([0, 5], 0), ([5, 7], 5), ([1 << 31, 5], 0), ([u32::MAX, u32::MAX], 0)] {
        let records = vec![a("a.example.", ttls[0], [10, 0, 0, 1]), a("a.example.", ttls[1], [10, 0, 0, 2])];
        let address = of(records).await;
        assert_eq!(asked_raw(address, "a.example").await, found(&["10.0.0.1", "10.0.0.2"], kept), "{ttls:?}");
    }
    let longest = vec![a("a.example.", i32::MAX as u32, [10, 0, 0, 1])];
    assert_eq!(asked_raw(of(longest).await, "a.example").await, found(&["10.0.0.1"], i32::MAX as u64));
    // The longest name, and one more octet.
    let longest = ["x".repeat(63), "x".repeat(63), "x".repeat(63), "x".repeat(61)].join(".");
    let address = of(Vec::new()).await;
    assert_eq!(asked_raw(address, &longest).await, nothing(false, None));
    assert!(asked_raw(address, &format!("{longest}x")).await.is_err());
}

#[tokio::test]
async fn what_answers_no_question_of_ours_is_passed_over() {
    let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 512];
        let (length, from) = server.recv_from(&mut buffer).await.unwrap();
        let request = Message::from_vec(&buffer[..length]).unwrap();
        let reply = |id: u16, name: &str, ip: [u8; 4]| {
            let name = Name::from_ascii(name).unwrap();
            let mut reply = Message::response(id, OpCode::Query);
            reply.add_query(Query::query(name.clone(), RecordType::A));
            let data = RData::A(hickory_proto::rr::rdata::A(ip.into()));
            reply.add_answer(hickory_proto::rr::Record::from_rdata(name, 5, data));
            reply.to_vec().unwrap()
        };
        let id = request.metadata.id;
        let wrong = [b"x".to_vec(), reply(id ^ 1, "a.example.", [6; 4]), reply(id, "b.example.", [6; 4])];
        for message in
            wrong.iter().chain([&buffer[..length].to_vec(), &reply(id, "a.example.", [10, 0, 0, 1])])
        {
            server.send_to(message, from).await.unwrap();
        }
    });
    let patient = Servers { timeout: Duration::from_secs(20), ..servers(&[address]) };
    let answer = ask(&patient, &Metrics::default(), "a.example", Family::V4).await;
    assert_eq!(answer.map_err(|error| error.to_string()), found(&["10.0.0.1"], 5));
}
