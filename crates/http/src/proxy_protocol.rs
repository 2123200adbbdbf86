//! The PROXY protocol: a header before the first byte of a connection, by which a proxy passes on the client's
//! addresses. Version 1 is text, version 2 binary. Source:
//! <https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>.
//!
//! Does no IO. Parsing never asks for more bytes than a header can have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Version of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyVersion {
    /// Text, `PROXY TCP4 …`.
    V1,
    /// Binary.
    V2,
}

/// Addresses of a connection, as the proxy in front saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Address of the client.
    pub source: SocketAddr,
    /// Address to which the client connected.
    pub destination: SocketAddr,
}

/// Result of parsing the first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParsedHeader {
    /// An incomplete header; more bytes are needed.
    Incomplete,
    /// No header.
    Absent,
    /// An invalid header.
    Invalid,
    /// A header with its version, its length in bytes and the addresses. There are none if the proxy opened the
    /// connection for itself (`LOCAL`), or if it names no IP addresses.
    Complete(ProxyVersion, usize, Option<Addresses>),
}

const SIGNATURE_V1: &[u8] = b"PROXY ";
const SIGNATURE_V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
/// Maximum length of a version 1 header, including CR LF (section 2.1).
const MAX_V1: usize = 107;
/// Length of the fixed part of a version 2 header.
const FIXED_V2: usize = 16;
/// Maximum length of a header in bytes.
pub const MAX: usize = FIXED_V2 + u16::MAX as usize;

/// Parses the first bytes of a connection.
pub fn parse(bytes: &[u8]) -> ParsedHeader {
    let begins = |signature: &[u8]| {
        let seen = bytes.len().min(signature.len());
        bytes[..seen] == signature[..seen]
    };
    if begins(SIGNATURE_V2) {
        return if bytes.len() < FIXED_V2 { ParsedHeader::Incomplete } else { binary(bytes) };
    }
    if !begins(SIGNATURE_V1) {
        return ParsedHeader::Absent;
    }
    let line = &bytes[..bytes.len().min(MAX_V1)];
    match memchr::memchr(b'\n', line) {
        Some(end) => text(&line[..=end]).unwrap_or(ParsedHeader::Invalid),
        None if line.len() < MAX_V1 => ParsedHeader::Incomplete,
        None => ParsedHeader::Invalid,
    }
}

/// Parses a version 1 header, including its line end.
fn text(line: &[u8]) -> Option<ParsedHeader> {
    let header = |ends| Some(ParsedHeader::Complete(ProxyVersion::V1, line.len(), ends));
    let text = std::str::from_utf8(line.strip_suffix(b"\r\n")?).ok()?;
    let mut words = text.strip_prefix("PROXY ")?.split(' ');
    let family = words.next()?;
    if family == "UNKNOWN" {
        // The rest of the line is ignored.
        return header(None);
    }
    let (source, destination) = (words.next()?, words.next()?);
    let ip = |word: &str| match family {
        "TCP4" => word.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
        "TCP6" => word.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        _ => None,
    };
    let (source, destination) = (ip(source)?, ip(destination)?);
    let mut port = || {
        let word = words.next()?;
        let plain = word.bytes().all(|b| b.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
        word.parse::<u16>().ok().filter(|_| plain)
    };
    let ends = Addresses {
        source: SocketAddr::new(source, port()?),
        destination: SocketAddr::new(destination, port()?),
    };
    if words.next().is_some() { None } else { header(Some(ends)) }
}

/// Parses a version 2 header whose fixed part is complete.
fn binary(bytes: &[u8]) -> ParsedHeader {
    let (command, family) = (bytes[12], bytes[13]);
    let length = usize::from(u16::from_be_bytes([bytes[14], bytes[15]]));
    if !matches!(command, 0x20 | 0x21) {
        return ParsedHeader::Invalid;
    }
    let total = FIXED_V2 + length;
    let Some(rest) = bytes.get(FIXED_V2..total) else { return ParsedHeader::Incomplete };
    // `LOCAL`: the proxy's own connection, such as a health check.
    let ends = match (command, family) {
        (0x20, _) => None,
        // Unspecified addresses and UNIX sockets have no IP address.
        (_, 0x00 | 0x31) => None,
        (_, 0x11) => match ends::<4>(rest) {
            Some(ends) => Some(ends),
            None => return ParsedHeader::Invalid,
        },
        (_, 0x21) => match ends::<16>(rest) {
            Some(ends) => Some(ends),
            None => return ParsedHeader::Invalid,
        },
        // Datagrams are not transported over TCP. The other values are not assigned.
        _ => return ParsedHeader::Invalid,
    };
    ParsedHeader::Complete(ProxyVersion::V2, total, ends)
}

/// Parses two addresses of `LENGTH` bytes and two ports. Extensions (TLVs) follow, which are ignored.
fn ends<const LENGTH: usize>(bytes: &[u8]) -> Option<Addresses>
where
    IpAddr: From<[u8; LENGTH]>,
{
    let (source, rest) = bytes.split_first_chunk::<LENGTH>()?;
    let (destination, rest) = rest.split_first_chunk::<LENGTH>()?;
    let (source_port, rest) = rest.split_first_chunk()?;
    let (destination_port, _) = rest.split_first_chunk()?;
    Some(Addresses {
        source: SocketAddr::new((*source).into(), u16::from_be_bytes(*source_port)),
        destination: SocketAddr::new((*destination).into(), u16::from_be_bytes(*destination_port)),
    })
}

/// Returns a header for a client's connection, or (without `ends`) for a connection of this proxy.
pub fn write(version: ProxyVersion, ends: Option<Addresses>) -> Vec<u8> {
    // Both addresses must have one family.
    let ends = ends.map(|Addresses { source, destination }| {
        let (from, to) = (source.ip().to_canonical(), destination.ip().to_canonical());
        let mapped = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let (from, to) = match (from, to) {
            (IpAddr::V4(_), IpAddr::V4(_)) => (from, to),
            _ => (mapped(from).into(), mapped(to).into()),
        };
        (from, to, source.port(), destination.port())
    });
    match (version, ends) {
        (ProxyVersion::V1, None) => b"PROXY UNKNOWN\r\n".to_vec(),
        (ProxyVersion::V1, Some((from, to, from_port, to_port))) => {
            let family = if from.is_ipv4() { "TCP4" } else { "TCP6" };
            format!("PROXY {family} {from} {to} {from_port} {to_port}\r\n").into_bytes()
        }
        (ProxyVersion::V2, ends) => {
            let mut out = SIGNATURE_V2.to_vec();
            let Some((from, to, from_port, to_port)) = ends else {
                out.extend([0x20, 0, 0, 0]);
                return out;
            };
            match (from, to) {
                (IpAddr::V4(from), IpAddr::V4(to)) => {
                    out.extend([0x21, 0x11, 0, 12]);
                    out.extend([from.octets(), to.octets()].as_flattened());
                }
                (from, to) => {
                    let bytes = |ip| match ip {
                        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                        IpAddr::V6(ip) => ip.octets(),
                    };
                    out.extend([0x21, 0x21, 0, 36]);
                    out.extend([bytes(from), bytes(to)].as_flattened());
                }
            }
            out.extend([from_port.to_be_bytes(), to_port.to_be_bytes()].as_flattened());
            out
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(source: &str, destination: &str) -> Addresses {
        Addresses { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
    }

    #[test]
    fn written_headers_are_parsed_whole_and_in_pieces() {
        let v4 = ends("10.0.0.1:40000", "10.0.0.2:80");
        let v6 = ends("[2001:db8::1]:40000", "[::1]:0");
        for version in [ProxyVersion::V1, ProxyVersion::V2] {
            for ends in [Some(v4), Some(v6), None] {
                let header = write(version, ends);
                for end in 0..header.len() {
                    assert_eq!(parse(&header[..end]), ParsedHeader::Incomplete, "{version:?} {ends:?} {end}");
                }
                let whole = ParsedHeader::Complete(version, header.len(), ends);
                assert_eq!(parse(&header), whole);
                assert_eq!(parse(&[&header[..], b"GET / HTTP/1.1\r\n"].concat()), whole);
            }
        }
        let mixed = write(ProxyVersion::V1, Some(ends("10.0.0.1:1", "[2001:db8::1]:2")));
        assert_eq!(mixed, b"PROXY TCP6 ::ffff:10.0.0.1 2001:db8::1 1 2\r\n");
    }

    #[test]
    fn text_headers_follow_the_specification() {
        let unknown = b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n";
        assert_eq!(parse(unknown), ParsedHeader::Complete(ProxyVersion::V1, unknown.len(), None));
        for broken in [
            "PROXY TCP4 10.0.0.1 10.0.0.2 1 2\n",
            "PROXY TCP4 10.0.0.1 10.0.0.2 1\r\n",
            "PROXY TCP4 10.0.0.1 10.0.0.2 1 2 3\r\n",
            "PROXY TCP4 10.0.0.1  10.0.0.2 1 2\r\n",
            "PROXY TCP4 10.0.0.1 ::1 1 2\r\n",
            "PROXY TCP6 10.0.0.1 10.0.0.2 1 2\r\n",
            "PROXY TCP4 10.0.0.1 10.0.0.2 1 65536\r\n",
            "PROXY TCP4 10.0.0.1 10.0.0.2 +1 2\r\n",
            "PROXY TCP4 10.0.0.1 10.0.0.2 01 2\r\n",
            "PROXY UDP4 10.0.0.1 10.0.0.2 1 2\r\n",
            "PROXY \r\n",
        ] {
            assert_eq!(parse(broken.as_bytes()), ParsedHeader::Invalid, "{broken}");
        }
        assert_eq!(parse(format!("PROXY {}", "x".repeat(101)).as_bytes()), ParsedHeader::Invalid);
        assert_eq!(parse(format!("PROXY {}", "x".repeat(100)).as_bytes()), ParsedHeader::Incomplete);
        for absent in
            ["PROXX", "proxy ", "GET / HTTP/1.1\r\n", "PRI * HTTP/2.0\r\n", "\r\n\r\nGET", "\x16\x03"]
        {
            assert_eq!(parse(absent.as_bytes()), ParsedHeader::Absent, "{absent}");
        }
    }

    #[test]
    fn binary_headers_follow_the_specification() {
        let header = |fixed: [u8; 4], rest: &[u8]| [SIGNATURE_V2, &fixed, rest].concat();
        // Extensions and the paths of UNIX sockets are ignored.
        let more = [&[10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2][..], b"\x01\0\x02h2"].concat();
        let expected = Some(ends("10.0.0.1:1", "10.0.0.2:2"));
        assert_eq!(
            parse(&header([0x21, 0x11, 0, 17], &more)),
            ParsedHeader::Complete(ProxyVersion::V2, 33, expected)
        );
        assert_eq!(
            parse(&header([0x21, 0x31, 0, 216], &[0; 216])),
            ParsedHeader::Complete(ProxyVersion::V2, 232, None)
        );
        assert_eq!(parse(&header([0x21, 0, 0, 0], &[])), ParsedHeader::Complete(ProxyVersion::V2, 16, None));
        // The addresses of a `LOCAL` header are ignored.
        assert_eq!(
            parse(&header([0x20, 0x11, 0, 12], &[1; 12])),
            ParsedHeader::Complete(ProxyVersion::V2, 28, None)
        );
        assert_eq!(parse(&header([0x21, 0x11, 255, 255], &[0; 100])), ParsedHeader::Incomplete);
        for fixed in [[0x11, 0x11, 0, 12], [0x22, 0x11, 0, 12], [0x21, 0x12, 0, 12], [0x21, 0x11, 0, 11]] {
            assert_eq!(parse(&header(fixed, &[0; 12])), ParsedHeader::Invalid, "{fixed:?}");
        }
        assert_eq!(parse(&header([0x21, 0x21, 0, 35], &[0; 35])), ParsedHeader::Invalid);
    }
}
