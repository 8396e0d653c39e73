//! A client that sends bytes as they are: what no HTTP client would send, or only in part.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use ureq::http::{HeaderMap, HeaderName, HeaderValue};

use super::service::parsed;
use super::{Reply, Service};

/// A connection to the service.
pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    pub(crate) fn open(service: &Service) -> Self {
        let address = service.base.strip_prefix("http://").unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        stream
            .set_write_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self(BufReader::new(stream))
    }

    /// Sends bytes, all of which the service must take.
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(bytes.as_ref()).unwrap();
    }

    /// Sends the head of a `POST` with these headers; `headers` ends its lines with `\r\n`.
    pub(crate) fn send_head(&mut self, path: &str, headers: &str) {
        self.send(format!(
            "POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}\r\n"
        ));
    }

    /// Reads one reply.
    pub(crate) fn reply(&mut self) -> Reply {
        self.reply_to("post")
    }

    /// Reads the reply to a method: one to `head` has no body.
    pub(crate) fn reply_to(&mut self, method: &str) -> Reply {
        let mut line = self.line();
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = HeaderMap::new();
        loop {
            line = self.line();
            let Some((name, value)) = line.split_once(": ") else {
                break;
            };
            headers.append(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_str(value).unwrap(),
            );
        }
        let length = headers.get("content-length").map_or(0, |length| {
            length.to_str().unwrap().parse::<usize>().unwrap()
        });
        let mut body = vec![0; if method == "head" { 0 } else { length }];
        self.0.read_exact(&mut body).unwrap();
        Reply {
            status,
            headers,
            body: parsed(&body),
            text: String::from_utf8_lossy(&body).into_owned(),
        }
    }

    /// Ends the sending; replies can still be read.
    pub(crate) fn finish_sending(&mut self) {
        self.0.get_ref().shutdown(Shutdown::Write).unwrap();
    }

    /// Reads whatever comes until the service ends the connection.
    pub(crate) fn wait_for_the_end(&mut self) {
        self.0.read_to_end(&mut Vec::new()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.ends_with("\r\n"), "the connection ended: {line:?}");
        line.trim_end().to_owned()
    }
}
