// What the author of a workflow would write instead of dedup-gate: one route, one statement a request.
// node benches/node-pg.mjs PORT DATABASE_URL, with `pg` where NODE_PATH says.

import { createServer } from 'node:http';
import { createRequire } from 'node:module';

// `import` does not look where NODE_PATH says.
const { Pool } = createRequire(import.meta.url)('pg');

const [port, connectionString] = process.argv.slice(2);
// As many connections as dedup-gate has, so that it is not these that make the difference.
const pool = new Pool({ connectionString, max: 16 });

const CLAIM = `INSERT INTO processed_orders (idempotency_key, order_id) VALUES ($1, $2)
  ON CONFLICT (idempotency_key) DO NOTHING RETURNING idempotency_key`;

const server = createServer((request, response) => {
  const answer = (status, value) => {
    response.statusCode = status;
    response.setHeader('Content-Type', 'application/json');
    response.end(JSON.stringify(value));
  };
  let body = '';
  request.on('data', chunk => { body += chunk; });
  request.on('end', async () => {
    try {
      const { idempotency_key, order_id } = JSON.parse(body);
      const { rowCount } = await pool.query(CLAIM, [idempotency_key, order_id]);
      answer(200, { claimed: rowCount === 1 });
    } catch (error) {
      answer(500, { message: error.message });
    }
  });
});

server.listen(Number(port), '127.0.0.1');
