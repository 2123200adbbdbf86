//! HTTP/1.1 requests.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    envoy::{
        self,
        Envoy::{self, Forwards, Refuses, Same},
    },
    server::{self, Server},
    support::within,
};

/// Input, reason for refusing it, status, and Envoy's decision. If the error is found after the head was
/// forwarded, the message must not be complete at the server.
type Refused = (&'static str, &'static str, &'static str, u16, Envoy);

/// Input, reason for accepting it, what the server receives, and Envoy's decision.
type Forwarded = (&'static str, &'static str, &'static str, &'static [&'static str], Envoy);

#[rustfmt::skip]
const REFUSED: &[Refused] = &[
    // End of a message.
    ("two lengths", "RFC 9112, 6.3: differing lengths are an unrecoverable error",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\nhello", 400, Same),
    ("the same length twice", "RFC 9112, 6.3 lets us merge them, and others count them otherwise",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400, Same),
    ("a list of lengths", "as above",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello", 400, Same),
    ("a length with a sign", "RFC 9110, 8.6: digits only",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello", 400, Same),
    ("a negative length", "RFC 9110, 8.6",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\nhello", 400, Same),
    ("a length in hexadecimal", "RFC 9110, 8.6",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\nhello", 400, Same),
    ("a length with a space in it", "RFC 9110, 8.6",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5 0\r\n\r\nhello", 400, Same),
    ("no number as length", "RFC 9110, 8.6",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", 400, Same),
    ("a length beyond 64 bits", "RFC 9110, 8.6: recipients must anticipate large numbers",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551621\r\n\r\nhello", 400, Same),
    ("a length and chunks", "RFC 9112, 6.3: might be an attempt to smuggle, ought to be handled as an error",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, Same),
    ("chunks and a length", "as above, the other way round",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400, Same),
    ("a length of 0 and chunks", "as above",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, Same),
    ("chunks in HTTP/1.0", "RFC 9112, 6.1: framing is faulty",
     "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, Forwards(1)),
    ("chunks, then identity", "RFC 9112, 6.1: unknown codings get 501",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501, Same),
    ("identity, then chunks", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", 501, Same),
    ("identity alone", "RFC 9112, 7: no coding any more",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello", 400, Same),
    ("gzip, then chunks", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, Same),
    ("almost chunked", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, Same),
    ("chunked, quoted", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", 501, Same),
    ("chunked with a parameter", "RFC 9112, 7.1: it defines none",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n", 501, Same),
    ("chunked, and a comma", "RFC 9110, 5.6.1 lets lists have empty elements; others see another coding",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked,\r\n\r\n0\r\n\r\n", 501, Same),
    ("chunked twice in one field", "RFC 9112, 6.1: a sender must not",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 501, Same),
    ("chunked in two fields", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501, Same),
    ("chunked and identity in two fields", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 501, Same),
    ("no coding named", "RFC 9112, 6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n\r\n", 501, Same),
    ("a space before the colon", "RFC 9112, 5.1: must be refused with 400",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400, Same),
    ("a tab before the colon", "RFC 9112, 5.1",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length\t: 5\r\n\r\nhello", 400, Same),
    ("a vertical tab before the coding", "RFC 9110, 5.5: a control byte, no white space",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \u{b}chunked\r\n\r\n0\r\n\r\n", 400, Same),
    ("a form feed after the coding", "RFC 9110, 5.5",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\u{c}\r\n\r\n0\r\n\r\n", 400, Same),

    // Lines.
    ("a folded line", "RFC 9112, 5.2: must be refused, or replaced",
     "POST / HTTP/1.1\r\nHost: a\r\nX: y\r\n Content-Length: 5\r\n\r\nhello", 400, Forwards(1)),
    ("a folded coding", "RFC 9112, 5.2",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400, Forwards(1)),
    ("white space before the first field", "RFC 9112, 2.2",
     "GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400, Same),
    ("lines that end with LF alone", "RFC 9112, 2.2 lets us; those in front may not",
     "GET / HTTP/1.1\nHost: a\n\n", 400, Forwards(1)),
    ("one line that ends with LF alone", "RFC 9112, 2.2",
     "POST / HTTP/1.1\r\nHost: a\r\nX: y\nContent-Length: 5\r\n\r\nhello", 400, Forwards(1)),
    ("an empty line that is LF alone", "RFC 9112, 2.2",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\nhello\r\n\r\n", 400, Forwards(1)),
    ("CR alone in a value", "RFC 9112, 2.2: invalid, or replaced by a space",
     "POST / HTTP/1.1\r\nHost: a\r\nX: y\rContent-Length: 5\r\n\r\nhello", 400, Forwards(1)),
    ("CR twice before LF", "RFC 9112, 2.2",
     "GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", 400, Forwards(1)),
    ("CR alone before the request", "RFC 9112, 2.2 lets empty lines come first, and this is none",
     "\rGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("LF alone before the request", "RFC 9112, 2.2",
     "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("NUL in a value", "RFC 9110, 5.5: dangerous",
     "GET / HTTP/1.1\r\nHost: a\r\nX: y\0z\r\n\r\n", 400, Same),
    ("NUL in a name", "RFC 9110, 5.1: names are tokens",
     "GET / HTTP/1.1\r\nHost: a\r\nX\0: y\r\n\r\n", 400, Same),
    ("a control byte in a value", "RFC 9110, 5.5",
     "GET / HTTP/1.1\r\nHost: a\r\nX: y\u{1}z\r\n\r\n", 400, Same),
    ("DEL in a value", "RFC 9110, 5.5",
     "GET / HTTP/1.1\r\nHost: a\r\nX: y\u{7f}z\r\n\r\n", 400, Same),
    ("a space in a name", "RFC 9110, 5.1",
     "POST / HTTP/1.1\r\nHost: a\r\nX Content-Length: 5\r\n\r\nhello", 400, Same),
    ("a name that is not ASCII", "RFC 9110, 5.1",
     "GET / HTTP/1.1\r\nHost: a\r\nX\u{e9}: y\r\n\r\n", 400, Same),
    ("no name", "RFC 9110, 5.1",
     "GET / HTTP/1.1\r\nHost: a\r\n: y\r\n\r\n", 400, Same),
    ("no colon", "RFC 9112, 5",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length 5\r\n\r\nhello", 400, Same),

    // Request lines.
    ("two spaces before the target", "RFC 9112, 3: exactly one",
     "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("two spaces before the version", "RFC 9112, 3",
     "GET /  HTTP/1.1\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("a space after the version", "RFC 9112, 3",
     "GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("a space before the method", "RFC 9112, 3",
     " GET / HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("tabs for spaces", "RFC 9112, 3",
     "GET\t/\tHTTP/1.1\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("a space in the target", "RFC 9112, 3.2: 400, and no attempt to correct it",
     "GET /a HTTP/1.1 b HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("CR in the target", "RFC 9112, 3.2",
     "GET /a\rb HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("NUL in the target", "RFC 9112, 3.2",
     "GET /a\0b HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a fragment in the target", "RFC 9112, 3.2: no form has one",
     "GET /a#b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 400, Same),
    ("no target", "RFC 9112, 3",
     "GET HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a relative target", "RFC 9112, 3.2.1",
     "GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a star for another method", "RFC 9112, 3.2.4",
     "GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a method that is not a token", "RFC 9110, 9.1",
     "GE(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("HTTP/0.9", "it has no head that could be routed by",
     "GET /\r\n\r\n", 400, Refuses(0)),
    ("HTTP/2.0 that is not a preface", "RFC 9112, 2.3: another major version",
     "GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, Forwards(1)),
    ("HTTP/1.2", "RFC 9112, 2.3 allows reading it as 1.1, but its meaning is unknown",
     "GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505, Forwards(1)),
    ("HTTP/01.1", "RFC 9112, 2.3: one digit each",
     "GET / HTTP/01.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a version in lower case", "RFC 9112, 2.3: case counts",
     "GET / http/1.1\r\nHost: a\r\n\r\n", 400, Same),

    // Host.
    ("no host", "RFC 9112, 3.2: must be refused with 400",
     "GET / HTTP/1.1\r\nX: y\r\n\r\n", 400, Same),
    ("two hosts", "RFC 9112, 3.2",
     "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, Forwards(1)),
    ("the same host twice", "RFC 9112, 3.2",
     "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("a list of hosts", "RFC 9112, 3.2: an invalid value",
     "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400, Same),
    ("a host with a port of letters", "RFC 3986, 3.2.3: no port to some, and no part of it to others",
     "GET / HTTP/1.1\r\nHost: a:x\r\n\r\n", 400, Forwards(1)),
    ("a host with two ports", "RFC 3986, 3.2.3",
     "GET / HTTP/1.1\r\nHost: a:1:2\r\n\r\n", 400, Forwards(1)),
    ("CONNECT to two ports", "RFC 9112, 3.2.3",
     "CONNECT a:1:2 HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("CONNECT to a port with a sign", "RFC 9112, 3.2.3",
     "CONNECT a:+1 HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a host with a path", "RFC 9112, 3.2",
     "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, Same),
    ("a host with a user", "RFC 9110, 4.2.4: would hide the host",
     "GET / HTTP/1.1\r\nHost: b@a\r\n\r\n", 400, Forwards(1)),
    ("a target with a user", "RFC 9110, 4.2.4",
     "GET http://b@a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400, Forwards(1)),
    ("a target of another scheme", "RFC 9110, 7.1: only http and https are ours",
     "GET ftp://b/ HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("a target without an authority", "RFC 9110, 4.2.1",
     "GET http:///b HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("CONNECT to a path", "RFC 9112, 3.2.3",
     "CONNECT /a HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),
    ("CONNECT without a port", "RFC 9112, 3.2.3",
     "CONNECT a HTTP/1.1\r\nHost: a\r\n\r\n", 400, Same),

    // Chunks.
    ("a size that is not a number", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\ng\r\n\r\n", 400, Same),
    ("no size", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\r\n0\r\n\r\n", 400, Same),
    ("a size with 0x", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("a size with a sign", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("a negative size", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("a size with an underscore", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0_5\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("a size beyond 64 bits", "RFC 9112, 7.1: overflows must not happen",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("zeros without end before a size", "RFC 9112, 7.1; 15 digits are enough",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n00000000000000005\r\nhello\r\n0\r\n\r\n", 400, Forwards(1)),
    ("a space before a size", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("a space after a size", "RFC 9112, 7.1.1: only before an extension, and not even there",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n", 400, Forwards(1)),
    ("LF alone after a size", "RFC 9112, 2.2 and 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", 400, Same),
    ("CR alone after a size", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\rXhello\r\n0\r\n\r\n", 400, Same),
    ("LF in an extension", "RFC 9112, 7.1.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nhello\r\n0\r\n\r\n", 400, Same),
    ("CR in an extension", "RFC 9112, 7.1.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a\rb\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("LF in a quoted extension", "RFC 9110, 5.6.4: no quoted string holds one",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a=\"\n\"\r\nhello\r\n0\r\n\r\n", 400, Same),
    ("NUL in an extension", "RFC 9112, 7.1.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;\0\r\nhello\r\n0\r\n\r\n", 400, Forwards(1)),
    ("a chunk longer than its size", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n", 400, Forwards(1)),
    ("a chunk shorter than its size", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello\r\n0\r\n\r\n", 400, Forwards(1)),
    ("LF alone after a chunk", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n", 400, Forwards(1)),
    ("nothing after a chunk", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n", 400, Same),
    ("a length in trailers", "RFC 9110, 6.5.1: must not be there",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n", 400, Forwards(1)),
    ("a coding in trailers", "RFC 9110, 6.5.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", 400, Forwards(1)),
    ("a host in trailers", "RFC 9110, 6.5.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nHost: b\r\n\r\n", 400, Forwards(1)),
    ("the client identity in trailers", "RFC 9110, 6.5.1: fields that identify the client must not come late",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Forwarded-Client-Cert: URI=b\r\n\r\n", 400, Forwards(1)),
    ("a folded trailer", "RFC 9112, 5.2",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n z\r\n\r\n", 400, Forwards(1)),
    ("LF alone in trailers", "RFC 9112, 2.2",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n", 400, Forwards(1)),
    ("NUL in trailers", "RFC 9110, 5.5",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: \0\r\n\r\n", 400, Same),

    // Fields that `Connection` names.
    ("Connection names the host", "RFC 9110, 7.6.1: only fields of this connection; removing it would change the destination of the request",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: host\r\n\r\n", 400, Same),
    ("Connection names the client identity", "as above: the client identity from a proxy in front would be lost",
     "GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 1.2.3.4\r\nConnection: x-forwarded-for\r\n\r\n", 400, Same),
    ("Connection names a pseudo-header", "as above, for a server of HTTP/2",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: :path\r\n\r\n", 400, Same),

    // Upgrades. The tests allow WebSocket.
    ("two protocols", "RFC 9110, 7.8: the server may choose either, and one of them is not allowed",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n\r\n", 403, Same),
    ("two protocols, the other first", "as above",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nUpgrade: websocket\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", 403, Same),
    ("two protocols in one field", "as above",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket, h2c\r\n\r\n", 403, Same),
    ("a protocol and an empty one", "RFC 9110, 5.6.1",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket,\r\n\r\n", 403, Same),
    ("a protocol twice", "as Envoy: a list is none that is allowed",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: websocket\r\n\r\n", 403, Same),
    ("HTTP/2 twice", "as above",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: h2c\r\n\r\n", 403, Same),
    ("no protocol named", "RFC 9110, 7.8",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade:\r\n\r\n", 403, Same),
    ("more connection options than anyone has", "RFC 9110, 7.6.1: each is compared with all fields",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: a,b,c,d,e,f\r\nConnection: g,h,i,j\r\n\r\n", 400, Same),
];

#[rustfmt::skip]
const FORWARDED: &[Forwarded] = &[
    ("a length", "RFC 9112, 6.2",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
     &["POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"], Same),
    ("a length with zeros before it", "RFC 9110, 8.6: 1*DIGIT; encoded again",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 005\r\n\r\nhello",
     &["POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"], Same),
    ("what follows a length is the next request", "RFC 9112, 6.2",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhelloGET /b HTTP/1.1\r\nHost: b\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello", "GET /b HTTP/1.1\r\nhost: b\r\n\r\n"], Same),
    ("a GET with a body", "RFC 9110, 9.3.1: framing does not depend on the method",
     "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhelloGET /b HTTP/1.1\r\nHost: b\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello", "GET /b HTTP/1.1\r\nhost: b\r\n\r\n"], Same),
    ("empty lines before a request", "RFC 9112, 2.2: should be ignored",
     "\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\n\r\n"], Same),
    ("chunks in capitals", "RFC 9112, 7: coding names are case-insensitive",
     "POST / HTTP/1.1\r\nHost: a\r\nTRANSFER-ENCODING: CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"], Same),
    ("a tab before the coding", "RFC 9112, 5: optional white space",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\tchunked\t\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"], Same),
    ("a size with zeros before it", "RFC 9112, 7.1: 1*HEXDIG; encoded again",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0005\r\nhello\r\n000\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"], Same),
    ("extensions", "RFC 9112, 7.1.1: taken away",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b;c=\"d;\"\r\nhello\r\n0;e\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"], Same),
    ("what follows the last chunk is the next request", "RFC 9112, 7.1",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /b HTTP/1.1\r\nHost: b\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "GET /b HTTP/1.1\r\nhost: b\r\n\r\n"], Same),
    ("trailers", "RFC 9112, 7.1.2",
     "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Sum: 5\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-sum: 5\r\n\r\n"], Same),
    ("the target's authority", "RFC 9112, 3.2.2: it replaces the Host field",
     "GET http://b/c HTTP/1.1\r\nHost: a\r\n\r\n",
     &["GET /c HTTP/1.1\r\nhost: b\r\n\r\n"], Same),
    ("a target with nothing but an authority", "RFC 9112, 3.2.1: the path is /",
     "GET http://b HTTP/1.1\r\nHost: a\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: b\r\n\r\n"], Same),
    ("names that look like a length's and a coding's", "RFC 9110, 5.1: other fields; servers that take _ for - must be protected from them otherwise",
     "GET / HTTP/1.1\r\nHost: a\r\nContent_Length: 5\r\nTransfer_Encoding: chunked\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\ncontent_length: 5\r\ntransfer_encoding: chunked\r\n\r\n"], Same),
    ("Connection names the length", "RFC 9110, 7.6.1: the message is framed by what was understood",
     "POST / HTTP/1.1\r\nHost: a\r\nConnection: content-length\r\nContent-Length: 5\r\n\r\nhello",
     &["POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"], Same),
    ("Connection names the coding", "RFC 9110, 7.6.1",
     "POST / HTTP/1.1\r\nHost: a\r\nConnection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     &["POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], Same),
    ("Connection names a field of its own", "RFC 9110, 7.6.1: it goes no further",
     "GET / HTTP/1.1\r\nHost: a\r\nX-Own: 1\r\nX-Other: 2\r\nConnection: x-own\r\nKeep-Alive: 5\r\nTE: gzip\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nx-other: 2\r\n\r\n"], Same),
    ("an upgrade to HTTP/2 with content", "RFC 9110, 7.8: may be passed over, and is never passed on",
     "POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: 2\r\n\r\nhi",
     &["POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi"], Same),
    ("an upgrade to HTTP/2 that Connection does not name", "RFC 7540, 3.2.1: its settings are for this hop alone",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nX-Other: 2\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nx-other: 2\r\n\r\n"], Same),
    ("HTTP2-Settings beside another upgrade", "RFC 7540, 3.2.1: only for the next hop",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nsec-websocket-key: k\r\nconnection: upgrade\r\n\r\n"], Same),
    ("HTTP2-Settings without an upgrade", "RFC 7540, 3.2.1",
     "GET / HTTP/1.1\r\nHost: a\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\n\r\n"], Same),
    ("Connection names a field beside an upgrade", "RFC 9110, 7.6.1: it goes no further",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, X-Own\r\nUpgrade: websocket\r\nX-Own: 1\r\nSec-WebSocket-Key: k\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nsec-websocket-key: k\r\nconnection: upgrade\r\n\r\n"], Same),
    ("an empty protocol beside one", "RFC 9110, 5.6.1: it counts for nothing",
     "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade:\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nsec-websocket-key: k\r\nconnection: upgrade\r\n\r\n"], Same),
    ("credentials twice", "RFC 9110, 5.3: a single field, so none of several values may decide",
     "GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nX: 1\r\nauthorization: Bearer b\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nauthorization: Bearer a,Bearer b\r\nx: 1\r\n\r\n"], Same),
    ("cookies in two fields", "RFC 6265, 5.4: there is one",
     "GET / HTTP/1.1\r\nHost: a\r\nCookie: a=1\r\nCookie: a=2; b=3\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\ncookie: a=1; a=2; b=3\r\n\r\n"], Same),
    ("a content type twice", "RFC 9110, 5.3",
     "POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/grpc\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nhi",
     &["POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc,text/plain\r\ncontent-length: 2\r\n\r\nhi"], Same),
    ("a field that is not known twice", "RFC 9110, 5.3: order is all that counts",
     "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\nY: 2\r\nX: 3\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nx: 1\r\ny: 2\r\nx: 3\r\n\r\n"], Same),
    ("bytes beyond ASCII in a value", "RFC 9110, 5.5: opaque",
     "GET / HTTP/1.1\r\nHost: a\r\nX: \u{e9}\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: a\r\nx: \u{e9}\r\n\r\n"], Same),
    ("bytes beyond ASCII in the target", "RFC 3986, 2.1: written as such bytes are",
     "GET /\u{e9} HTTP/1.1\r\nHost: a\r\n\r\n",
     &["GET /%C3%A9 HTTP/1.1\r\nhost: a\r\n\r\n"], Refuses(400)),
    ("an empty host", "RFC 9112, 3.2: what a client sends whose target has no authority",
     "GET / HTTP/1.1\r\nHost:\r\n\r\n",
     &["GET / HTTP/1.1\r\nhost: \r\n\r\n"], Same),
    ("OPTIONS without a path", "RFC 9112, 3.2.4 has the last proxy send *, for which no route by prefix is",
     "OPTIONS http://b HTTP/1.1\r\nHost: a\r\n\r\n",
     &["OPTIONS / HTTP/1.1\r\nhost: b\r\ncontent-length: 0\r\n\r\n"], Same),
];

/// Result of a case.
#[derive(Debug)]
struct Outcome {
    /// Statuses of the responses.
    answers: Vec<u16>,
    /// The connection was closed.
    closed: bool,
    /// Requests that the server received.
    requests: Vec<String>,
    /// Requests that the server received from the next client.
    next: Vec<String>,
}

/// Sends a case and reads until the connection is closed or `wanted` requests have been answered.
async fn run(address: SocketAddr, server: &Server, case: &str, wanted: usize) -> Outcome {
    let mut stream = within(TcpStream::connect(address)).await.unwrap();
    // The proxy may refuse it before it has read all.
    let _ = stream.write_all(case.as_bytes()).await;
    let (mut received, mut closed) = (String::new(), false);
    let answered = |received: &str| received.matches("\r\n\r\nfine").count();
    let _ = tokio::time::timeout(TIMEOUT, async {
        let mut block = [0; 4096];
        while wanted == 0 || answered(&received) < wanted {
            match stream.read(&mut block).await {
                Ok(count @ 1..) => received += &String::from_utf8_lossy(&block[..count]),
                _ => {
                    closed = true;
                    break;
                }
            }
        }
    })
    .await;
    drop(stream);
    let requests = server.requests();
    let statuses = received.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap());
    Outcome { answers: statuses.collect(), closed, requests, next: next(address, server).await }
}

/// Sends the next client's request and returns what the server received.
pub(crate) async fn next(address: SocketAddr, server: &Server) -> Vec<String> {
    let mut stream = within(TcpStream::connect(address)).await.unwrap();
    stream.write_all(NEXT.as_bytes()).await.unwrap();
    let mut all = String::new();
    within(stream.read_to_string(&mut all)).await.unwrap();
    server.requests()
}

/// Returns whether the next client's request arrived unaffected.
pub(crate) fn is_next(requests: &[String]) -> bool {
    let whole = |request: &String| {
        request.starts_with("GET /next HTTP/1.1\r\nhost: next\r\n")
            && request.matches("\r\n\r\n").count() == 1
    };
    requests.len() == 1 && whole(&requests[0])
}

/// Request of the next client.
const NEXT: &str = "GET /next HTTP/1.1\r\nHost: next\r\nConnection: close\r\n\r\n";
/// Timeout for expected events. No case passes because of it.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Outcome {
    fn is_refused(&self, status: u16) -> bool {
        let answers: &[u16] = if status == 0 { &[] } else { &[status] };
        is_next(&self.next) && self.closed && self.requests.is_empty() && self.answers == answers
    }

    fn is_forwarded(&self, count: usize) -> bool {
        is_next(&self.next) && self.requests.len() == count && self.answers == vec![200; count]
    }
}

#[tokio::test]
async fn ambiguous_requests_are_refused_and_others_arrive_unchanged() {
    let (server, address) = Server::start().await;
    let proxy = server::proxy(address).await;
    let mut wrong = Vec::new();
    for (what, why, sends, status, _) in REFUSED {
        let outcome = run(proxy.address, &server, sends, 0).await;
        if !outcome.is_refused(*status) {
            wrong.push(format!("{what} must be refused with {status} ({why}): {outcome:?}"));
        }
    }
    for (what, why, sends, requests, _) in FORWARDED {
        let outcome = run(proxy.address, &server, sends, requests.len()).await;
        if !outcome.is_forwarded(requests.len()) || outcome.requests != *requests {
            wrong.push(format!("{what} must be forwarded as {requests:?} ({why}): {outcome:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn envoys_decisions_are_those_of_the_tables() {
    let (server, address) = Server::start().await;
    let (_running, envoy) = envoy::start(address, false).await;
    let mut wrong = Vec::new();
    let refused = REFUSED.iter().map(|(what, _, sends, status, envoy)| {
        (what, sends, if let Same = envoy { Refuses(*status) } else { *envoy })
    });
    let forwarded = FORWARDED.iter().map(|(what, _, sends, requests, envoy)| {
        (what, sends, if let Same = envoy { Forwards(requests.len()) } else { *envoy })
    });
    for (what, sends, expected) in refused.chain(forwarded) {
        let wanted = if let Forwards(count) = expected { count } else { 0 };
        let outcome = run(envoy, &server, sends, wanted).await;
        let as_said = match expected {
            Same => false,
            Refuses(status) => outcome.is_refused(status),
            Forwards(count) => is_next(&outcome.next) && outcome.requests.len() == count,
        };
        if !as_said {
            wrong.push(format!("{what}: expected {expected:?}, got {outcome:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
