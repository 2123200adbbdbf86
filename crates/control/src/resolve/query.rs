//! DNS client: sends one query to the configured servers and interprets the response (RFC 1035, RFC 2308).
//!
//! | Step | Function | Source |
//! |---|---|---|
//! | Follow aliases over several responses | [`lookup`] | RFC 1034, section 5.3.3 |
//! | Try each server, at most `attempts` times | [`query_servers`] | resolv.conf(5) |
//! | Query by UDP, then by TCP if the response is truncated | [`query_server`] | RFC 1035, section 4.2 |
//! | Match the response to the query | [`response_to`] | RFC 5452 |
//! | Read addresses, aliases and TTLs | [`interpret`] | RFC 2308, section 5; RFC 2181, section 8 |
//!
//! Names are absolute: no search list applies, because the control plane serves many namespaces. Each query has its own
//! socket and a random id, so that an attacker cannot predict them and forge a response (RFC 5452). The server that
//! answered last is queried first, so that only one query waits for an unreachable server.

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

use super::servers::Servers;
use crate::metrics::{Metrics, count};

/// Maximum number of names in a chain of CNAME records.
const MAX_CNAME_CHAIN: usize = 16;
/// Maximum size of a UDP message in bytes. Servers that ignore the limit of 512 bytes send larger ones.
const MAX_UDP_MESSAGE: usize = 4096;
/// QR bit in the third byte of the header: the message is a response (RFC 1035, section 4.1.1).
const QR_BIT: u8 = 0x80;
/// TC bit in the third byte of the header: the message is truncated.
const TC_BIT: u8 = 0x02;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Family {
    /// IPv4, `A` records.
    V4,
    /// IPv6, `AAAA` records.
    V6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Returns whether an address belongs to the family.
    pub(crate) const fn contains(self, address: &IpAddr) -> bool {
        matches!((self, address), (Self::V4, IpAddr::V4(_)) | (Self::V6, IpAddr::V6(_)))
    }

    const fn record_type(self) -> RecordType {
        match self {
            Self::V4 => RecordType::A,
            Self::V6 => RecordType::AAAA,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.record_type())
    }
}

/// Addresses of a name in one family, as DNS reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Addresses in the order of the response, and their TTL.
    Addresses(Vec<IpAddr>, Duration),
    /// The name has no addresses of this family.
    NoAddresses {
        /// The name does not exist (`NXDOMAIN`).
        nxdomain: bool,
        /// TTL of this answer; `None` if the response has no SOA record.
        ttl: Option<Duration>,
    },
}

/// Reason why a lookup has no answer, as text for logs and pages.
pub(crate) type LookupError = Arc<str>;

/// Meaning of one response.
enum Interpretation {
    /// The response answers the query.
    Answer(Answer),
    /// The response ends with an alias whose target is still to be looked up.
    Alias {
        target: Name,
        /// TTL of the chain up to the target, in seconds.
        ttl: u32,
    },
}

/// A response by UDP.
enum UdpResponse {
    Complete(Message),
    /// Only TCP returns the whole response.
    Truncated,
}

/// Looks up the addresses of a name. Follows an alias whose target the response does not resolve (RFC 1034, section
/// 5.3.3). Some servers omit a target that they cannot resolve; the target may still have addresses.
pub(crate) async fn lookup(
    servers: &Servers,
    metrics: &Metrics,
    name: &str,
    family: Family,
) -> Result<Answer, LookupError> {
    // The final dot makes the name absolute.
    let mut name = Name::from_ascii(format!("{name}.")).map_err(|error| error.to_string())?;
    let mut max_ttl = u32::MAX;
    for _ in 0..MAX_CNAME_CHAIN {
        let query = Query::query(name, family.record_type());
        match query_servers(servers, metrics, &query, max_ttl).await? {
            Interpretation::Answer(answer) => return Ok(answer),
            Interpretation::Alias { target, ttl } => (name, max_ttl) = (target, ttl),
        }
    }
    Err(chain_too_long().into())
}

/// Queries one server after another until one answers.
async fn query_servers(
    servers: &Servers,
    metrics: &Metrics,
    query: &Query,
    max_ttl: u32,
) -> Result<Interpretation, LookupError> {
    let mut last_error = LookupError::from("no DNS servers are configured");
    for _ in 0..servers.attempts {
        for (index, server) in servers.in_order() {
            let error = match timeout(servers.timeout, query_server(server, metrics, query)).await {
                Ok(Ok(message)) => match interpret(&message, query, max_ttl) {
                    Ok(interpretation) => {
                        servers.prefer(index);
                        return Ok(interpretation);
                    }
                    Err(error) => format!("{server}: {error}"),
                },
                Ok(Err(error)) => format!("{server}: {error}"),
                Err(_) => format!("{server} does not answer within {:?}", servers.timeout),
            };
            last_error = error.into();
        }
    }
    Err(last_error)
}

/// Queries one server by UDP, and by TCP if the response is truncated.
async fn query_server(server: SocketAddr, metrics: &Metrics, query: &Query) -> io::Result<Message> {
    let mut request = Message::new(random_id()?, MessageType::Query, OpCode::Query);
    request.metadata.recursion_desired = true;
    request.add_query(query.clone());
    let bytes = request.to_vec().map_err(io::Error::other)?;
    match query_by_udp(server, metrics, &request, &bytes).await? {
        UdpResponse::Complete(message) => return Ok(message),
        UdpResponse::Truncated => {}
    }
    count(&metrics.dns_queries_tcp);
    query_by_tcp(server, &request, &bytes).await
}

async fn query_by_udp(
    server: SocketAddr,
    metrics: &Metrics,
    request: &Message,
    bytes: &[u8],
) -> io::Result<UdpResponse> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    count(&metrics.dns_queries_udp);
    socket.send(bytes).await?;
    let mut buffer = vec![0; MAX_UDP_MESSAGE];
    loop {
        let length = socket.recv(&mut buffer).await?;
        // Ignores messages that do not answer this request; the response may follow.
        if let Some(response) = udp_response_to(request, &buffer[..length]) {
            return Ok(response);
        }
    }
}

/// Messages by TCP have a prefix of two bytes with their length (RFC 1035, section 4.2.2).
async fn query_by_tcp(server: SocketAddr, request: &Message, bytes: &[u8]) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await?;
    let mut response = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut response).await?;
    response_to(request, &response)
        .ok_or_else(|| io::Error::other("the response by TCP does not match the query"))
}

/// Returns an id that an attacker cannot predict (RFC 5452, section 4.3).
fn random_id() -> io::Result<u16> {
    let mut bytes = [0; 2];
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(u16::from_be_bytes(bytes))
}

/// Returns the UDP response if it answers the request.
fn udp_response_to(request: &Message, bytes: &[u8]) -> Option<UdpResponse> {
    // A server may truncate a message at any byte, so only the header of a truncated one is read (RFC 1035, section
    // 4.1.1).
    if let [high, low, flags, ..] = bytes
        && u16::from_be_bytes([*high, *low]) == request.metadata.id
        && flags & (QR_BIT | TC_BIT) == QR_BIT | TC_BIT
    {
        return Some(UdpResponse::Truncated);
    }
    response_to(request, bytes).map(UdpResponse::Complete)
}

/// Returns the message if it answers the request: same id, same question.
fn response_to(request: &Message, bytes: &[u8]) -> Option<Message> {
    let message = Message::from_vec(bytes).ok()?;
    // A server that does not understand or accept a query may omit the question from its error response.
    let is_error_without_question = message.queries.is_empty()
        && !matches!(message.metadata.response_code, ResponseCode::NoError | ResponseCode::NXDomain);
    let matches = message.metadata.id == request.metadata.id
        && message.metadata.message_type == MessageType::Response
        && (message.queries == request.queries || is_error_without_question);
    matches.then_some(message)
}

/// Interprets a response, with TTLs of at most `max_ttl` seconds. Fails if the response code is an error.
fn interpret(message: &Message, query: &Query, max_ttl: u32) -> Result<Interpretation, String> {
    let code = message.metadata.response_code;
    if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
        return Err(format!("the response code is {code}"));
    }
    let (mut name, mut ttl) = (query.name().clone(), max_ttl);
    for _ in 0..MAX_CNAME_CHAIN {
        let records = || message.answers.iter().filter(|record| record.name == name);
        let (mut addresses, mut min_ttl) = (Vec::new(), ttl);
        for record in records().filter(|record| record.record_type() == query.query_type()) {
            addresses.extend(record.data.ip_addr());
            min_ttl = min_ttl.min(valid_ttl(record.ttl));
        }
        if !addresses.is_empty() {
            return Ok(Interpretation::Answer(Answer::Addresses(addresses, seconds(min_ttl))));
        }
        let alias = records().find_map(|record| match &record.data {
            RData::CNAME(alias) => Some((alias.0.clone(), valid_ttl(record.ttl))),
            _ => None,
        });
        let Some((target, alias_ttl)) = alias else {
            return Ok(interpret_no_addresses(message, query, name, ttl));
        };
        (name, ttl) = (target, ttl.min(alias_ttl));
    }
    Err(chain_too_long())
}

/// Interprets a response in which the last name of the chain has no addresses.
fn interpret_no_addresses(message: &Message, query: &Query, last: Name, max_ttl: u32) -> Interpretation {
    let nxdomain = message.metadata.response_code == ResponseCode::NXDomain;
    // RFC 2308, section 5: the smaller of the SOA record's TTL and its MINIMUM field.
    let ttl = message.authorities.iter().find_map(|record| match &record.data {
        RData::SOA(soa) => Some(seconds(valid_ttl(record.ttl).min(valid_ttl(soa.minimum)).min(max_ttl))),
        _ => None,
    });
    if ttl.is_none() && !nxdomain && last != *query.name() {
        return Interpretation::Alias { target: last, ttl: max_ttl };
    }
    Interpretation::Answer(Answer::NoAddresses { nxdomain, ttl })
}

/// Returns 0 for a TTL whose most significant bit is set (RFC 2181, section 8).
fn valid_ttl(ttl: u32) -> u32 {
    if ttl > i32::MAX as u32 { 0 } else { ttl }
}

fn seconds(ttl: u32) -> Duration {
    Duration::from_secs(ttl.into())
}

fn chain_too_long() -> String {
    format!("the CNAME records form a loop or a chain of more than {MAX_CNAME_CHAIN} names")
}

#[cfg(test)]
mod tests;
