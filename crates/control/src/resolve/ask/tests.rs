//! Questions to a real server, over real sockets.

use hickory_proto::op::ResponseCode;
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
