//! One question to the DNS servers, and what their answer means (RFC 1035, RFC 2308).
//!
//! Names are asked for as they stand: there is no search list, as whose it would be is not known. Each question goes out
//! by a socket and under a number of its own, which nobody can foresee, so that nobody else can answer it (RFC 5452).
//! The server that answered last is asked first, so that one that is dead costs one question its time and not all.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name, RData, RecordType},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use super::system::Servers;
use crate::metrics::{Metrics, count};

/// A name may stand for another so many times over.
const LONGEST_CHAIN: usize = 16;
/// The longest message that comes by UDP, from servers that know no better.
const LONGEST_UDP: usize = 4096;
/// In the third byte of a message: it is no question.
const RESPONSE: u8 = 0x80;
/// There: it is cut.
const TRUNCATED: u8 = 0x02;
const CHAIN: &str = "its name stands for another, and that for another, without end";

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Family {
    /// `A` records.
    V4,
    /// `AAAA` records.
    V6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Whether an address is of it.
    pub(crate) const fn is_of(self, address: &IpAddr) -> bool {
        matches!((self, address), (Self::V4, IpAddr::V4(_)) | (Self::V6, IpAddr::V6(_)))
    }

    const fn record(self) -> RecordType {
        match self {
            Self::V4 => RecordType::A,
            Self::V6 => RecordType::AAAA,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.record())
    }
}

/// What DNS says of the addresses of one family that a name has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// These, in the order of the answer, for so long.
    Addresses(Vec<IpAddr>, Duration),
    /// None, for so long if that was said: the name does not exist (`NXDOMAIN`), or has no such addresses.
    Nothing {
        /// There is no such name at all.
        missing: bool,
        /// How long that holds.
        ttl: Option<Duration>,
    },
}

/// Why there is no answer, for people.
pub(crate) type Failure = Arc<str>;

/// What one message says.
enum Said {
    /// All there is to know.
    All(Answer),
    /// The name stands for this one, of which it says nothing; for so many seconds.
    Alias(Name, u32),
}

/// What came by UDP.
enum Reply {
    /// The whole answer.
    Whole(Message),
    /// The beginning of one; the rest is to be had by TCP.
    Cut,
}

/// Asks for the addresses of a name, and of the name it stands for where the answer leaves that open (RFC 1034, section
/// 5.3.3): some servers do when they could not find out about the other name, and that is not to say that it has none.
pub(crate) async fn ask(
    servers: &Servers,
    metrics: &Metrics,
    name: &str,
    family: Family,
) -> Result<Answer, Failure> {
    // The dot at the end: it is the whole name.
    let mut name = Name::from_ascii(format!("{name}.")).map_err(|error| failure(&error))?;
    let mut longest = u32::MAX;
    for _ in 0..LONGEST_CHAIN {
        let query = Query::query(name, family.record());
        match ask_each(servers, metrics, &query, longest).await? {
            Said::All(answer) => return Ok(answer),
            Said::Alias(target, ttl) => (name, longest) = (target, ttl),
        }
    }
    Err(CHAIN.into())
}

/// Asks one server after the other, until one answers.
async fn ask_each(
    servers: &Servers,
    metrics: &Metrics,
    query: &Query,
    longest: u32,
) -> Result<Said, Failure> {
    let mut last = Failure::from("there are no DNS servers");
    for _ in 0..servers.attempts {
        for (index, server) in servers.in_order() {
            match timeout(servers.timeout, exchange(server, metrics, query)).await {
                Ok(Ok(message)) => match read(&message, query, longest) {
                    Ok(said) => {
                        servers.answered(index);
                        return Ok(said);
                    }
                    Err(why) => last = format!("{server} answers {why}").into(),
                },
                Ok(Err(error)) => last = format!("{server}: {error}").into(),
                Err(_) => last = format!("{server} does not answer within {:?}", servers.timeout).into(),
            }
        }
    }
    Err(last)
}

fn failure(error: &dyn fmt::Display) -> Failure {
    error.to_string().into()
}

/// Asks by UDP, and again by TCP if the answer does not fit.
async fn exchange(server: SocketAddr, metrics: &Metrics, query: &Query) -> io::Result<Message> {
    let mut request = Message::new(number()?, MessageType::Query, OpCode::Query);
    request.metadata.recursion_desired = true;
    request.add_query(query.clone());
    let bytes = request.to_vec().map_err(io::Error::other)?;
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    count(&metrics.dns_queries_udp);
    socket.send(&bytes).await?;
    let mut buffer = vec![0; LONGEST_UDP];
    loop {
        let length = socket.recv(&mut buffer).await?;
        match reply(&buffer[..length], &request) {
            Some(Reply::Cut) => break,
            Some(Reply::Whole(message)) => return Ok(message),
            // Somebody else's; ours may come still.
            None => {}
        }
    }
    count(&metrics.dns_queries_tcp);
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes.as_slice()].concat()).await?;
    let mut bytes = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut bytes).await?;
    response(&bytes, &request).ok_or_else(|| io::Error::other("its answer by TCP is not to our question"))
}

/// A number nobody can foresee.
fn number() -> io::Result<u16> {
    let mut bytes = [0; 2];
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut bytes).map_err(|_| io::Error::other("there are no random numbers"))?;
    Ok(u16::from_be_bytes(bytes))
}

/// The reply by UDP, if it answers this request.
fn reply(bytes: &[u8], request: &Message) -> Option<Reply> {
    // Servers may cut a message anywhere, so of one that is cut only the header can be read (RFC 1035, section 4.1.1).
    if let [high, low, flags, ..] = bytes
        && u16::from_be_bytes([*high, *low]) == request.metadata.id
        && flags & (RESPONSE | TRUNCATED) == RESPONSE | TRUNCATED
    {
        return Some(Reply::Cut);
    }
    response(bytes, request).map(Reply::Whole)
}

/// The message, if it answers this request.
fn response(bytes: &[u8], request: &Message) -> Option<Message> {
    let message = Message::from_vec(bytes).ok()?;
    // Who does not understand a question, or takes none, need not repeat it.
    let is_refusal = message.queries.is_empty()
        && !matches!(message.metadata.response_code, ResponseCode::NoError | ResponseCode::NXDomain);
    let answers = message.metadata.id == request.metadata.id
        && message.metadata.message_type == MessageType::Response
        && (message.queries == request.queries || is_refusal);
    answers.then_some(message)
}

/// What a message says, for `longest` seconds at most; with another code the server has no answer.
fn read(message: &Message, query: &Query, longest: u32) -> Result<Said, String> {
    let code = message.metadata.response_code;
    if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
        return Err(code.to_string());
    }
    let (mut name, mut ttl) = (query.name().clone(), longest);
    for _ in 0..LONGEST_CHAIN {
        let of_name = || message.answers.iter().filter(|record| record.name == name);
        let found = of_name().filter(|record| record.record_type() == query.query_type());
        let (mut addresses, mut shortest) = (Vec::new(), ttl);
        for record in found {
            addresses.extend(record.data.ip_addr());
            shortest = shortest.min(kept(record.ttl));
        }
        if !addresses.is_empty() {
            return Ok(Said::All(Answer::Addresses(addresses, seconds(shortest))));
        }
        let alias = of_name().find_map(|record| match &record.data {
            RData::CNAME(alias) => Some((alias.0.clone(), kept(record.ttl))),
            _ => None,
        });
        let Some((target, of_alias)) = alias else { return Ok(nothing(message, query, name, ttl)) };
        (name, ttl) = (target, ttl.min(of_alias));
    }
    Err(CHAIN.to_owned())
}

/// What a message says in which the last name has no addresses.
fn nothing(message: &Message, query: &Query, last: Name, ttl: u32) -> Said {
    let missing = message.metadata.response_code == ResponseCode::NXDomain;
    // RFC 2308, section 5: as long as the zone's own record says, and no longer than this record may be kept.
    let soa = message.authorities.iter().find_map(|record| match &record.data {
        RData::SOA(soa) => Some(seconds(kept(record.ttl).min(kept(soa.minimum)).min(ttl))),
        _ => None,
    });
    if soa.is_none() && !missing && last != *query.name() {
        return Said::Alias(last, ttl);
    }
    Said::All(Answer::Nothing { missing, ttl: soa })
}

/// RFC 2181, section 8: what has the highest bit counts as nothing.
fn kept(ttl: u32) -> u32 {
    if ttl > i32::MAX as u32 { 0 } else { ttl }
}

fn seconds(ttl: u32) -> Duration {
    Duration::from_secs(ttl.into())
}

#[cfg(test)]
mod tests;
